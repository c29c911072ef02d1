"""An answer as it grows, and the inference responses that tell of it."""

from __future__ import annotations

from typing import Any

from ortolan.proto.inference.v2 import grpc_predict_v2_pb2 as pb
from ortolan.runtime.params import TokenEvent
from ortolan.runtime.serve.kserve_call import OUTPUTS, InferCall
from ortolan.runtime.serve.kserve_tensors import add_output

# As Triton's backend for vLLM says that a choice goes on.
_GOES_ON = "None"


class Answer:
    """What a request's choices have grown by since the last response, one entry for each.

    head: the response without its outputs, which every one begins with.
    """

    def __init__(
        self, call: InferCall, head: pb.ModelInferResponse, choices: int, prompt_tokens: int
    ) -> None:
        self._call = call
        self._head = head
        self._prompt_tokens = prompt_tokens
        self._cached_tokens = 0
        self._reasons = [_GOES_ON] * choices
        self._texts = [call.prompt if call.echo else ""] * choices
        self._tokens = [0] * choices

    def add(self, event: TokenEvent) -> None:
        """Take in what one choice has grown by."""
        self._texts[event.choice] += event.text
        self._tokens[event.choice] += len(event.token_ids)
        self._reasons[event.choice] = event.finish_reason or _GOES_ON
        if event.usage is not None:
            self._cached_tokens = event.usage.cached_tokens

    @property
    def done(self) -> bool:
        """Whether every choice has ended."""
        return _GOES_ON not in self._reasons

    def response(self) -> pb.ModelInferResponse:
        """What came since the last one."""
        values: dict[str, list[Any]] = {
            "text_output": [text.encode() for text in self._texts],
            "finish_reason": [reason.encode() for reason in self._reasons],
            "num_input_tokens": [self._prompt_tokens],
            "num_output_tokens": self._tokens,
            "num_cached_tokens": [self._cached_tokens],
        }
        response = pb.ModelInferResponse()
        response.CopyFrom(self._head)
        for name in self._call.outputs:
            add_output(response, name, OUTPUTS[name], values[name], raw=self._call.raw)
        self._texts = [""] * len(self._texts)
        self._tokens = [0] * len(self._tokens)
        return response
