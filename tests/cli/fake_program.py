"""The program with a model that says what it is told to; run as a script, or loaded by conftest."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any

import numpy as np

from ortolan.errors import EngineError, RequestError
from ortolan.runtime.params import Completion, Request, SamplingParams, TokenEvent, Usage


class FakeLLM:
    """Answers every prompt with the same pieces, one token each, and remembers what it was asked.

    context: most messages of a conversation. logits_row: what `logits` gives for any position.
    """

    def __init__(self, pieces: Sequence[str] = ("Hello", " wörld", " 🐦"), delay_s: float = 0.0):
        self.pieces = list(pieces)
        self.delay_s = delay_s
        self.context = 100
        self.finish_reason: Any = "stop"
        self.logits_row = np.zeros(8, np.float32)
        self.loaded: tuple[Path, dict[str, Any]] | None = None
        self.asked: list[Any] = []
        self.params: list[SamplingParams | None] = []
        self.sampling_defaults: dict[str, Any] = {}
        self.continues: list[bool] = []
        self.fails_at = 0  # which request of `run`, from 1
        self.closed = False
        self.streams_closed = 0
        self.tokenizer = SimpleNamespace(encode=lambda text: [len(text)])
        self.manifest = SimpleNamespace(model=SimpleNamespace(vocab_size=8))

    def load(self, path: Path, **settings: Any) -> FakeLLM:
        self.loaded = (path, settings)
        return self

    def __enter__(self) -> FakeLLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.closed = True

    def stream(self, prompt: Any, params: SamplingParams | None = None) -> Iterator[TokenEvent]:
        self.asked.append(prompt)
        self.params.append(params)
        return self._events()

    def stream_chat(
        self, messages: Sequence[Any], params: SamplingParams | None = None
    ) -> Iterator[TokenEvent]:
        if len(messages) > self.context:
            raise RequestError(f"the prompt has {len(messages)} messages")
        return self.stream([dict(message) for message in messages], params)

    def encode_chat(self, messages: Sequence[Any]) -> list[int]:
        self.asked.append([dict(message) for message in messages])
        return [len(messages)]

    def logits(self, token_ids: Sequence[int], positions: Sequence[int] | None = None) -> Any:
        return np.stack([self.logits_row for _ in positions or token_ids])

    def generate(self, prompt: Any, params: SamplingParams) -> list[Completion]:
        count = params.max_tokens or 0
        ids = tuple(range(count))
        return [Completion("", ids, "length", Usage(1, count), ttft_s=0.0)]

    def encode(self, prompt: Any) -> list[int]:
        self.asked.append(prompt)
        return [len(prompt)]

    def check(self, request: Request) -> None:
        if request.params.max_tokens == 666:
            raise RequestError("max_tokens is 666; the model refuses")

    def run(self, requests: Sequence[Request]) -> Iterator[list[Completion]]:
        for request in requests:
            self.params.append(request.params)
            self.continues.append(request.continues)
            time.sleep(self.delay_s)
            if self.fails_at == len(self.params):
                raise EngineError("the model's outputs are not finite")
            ids = tuple(range(len(self.pieces)))
            usage = Usage(5, len(ids), cached_tokens=3)
            yield [
                Completion(f"{''.join(self.pieces)}{choice or ''}", ids, "stop", usage, ttft_s=0.5)
                for choice in range(request.params.n)
            ]

    def _events(self) -> Iterator[TokenEvent]:
        try:
            for index, piece in enumerate(self.pieces):
                time.sleep(self.delay_s)
                last = index == len(self.pieces) - 1
                yield TokenEvent(
                    piece,
                    (index,),
                    finish_reason=self.finish_reason if last else None,
                    usage=Usage(5, len(self.pieces), cached_tokens=3) if last else None,
                )
        finally:
            self.streams_closed += 1


if __name__ == "__main__":
    import ortolan
    from ortolan.cli import main

    # Tests that run in the background, or under nohup, hand down signals that are ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, signal.SIG_DFL)

    pieces = int(os.environ.get("FAKE_PIECES", "3"))
    fake = FakeLLM(
        [f"wörd{number} " for number in range(pieces)],
        delay_s=float(os.environ.get("FAKE_DELAY_S", "0")),
    )
    fake.context = int(os.environ.get("FAKE_CONTEXT", fake.context))
    ortolan.load = fake.load  # type: ignore[assignment]  # a stand-in
    main()
