"""`Client`: a server from ordinary code."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Unpack

import grpc

from ortolan.client import convert
from ortolan.client.access import Access, AccessSettings
from ortolan.client.calls import (
    CHANNEL_OPTIONS,
    READY_POLL_S,
    Attempts,
    RetryPolicy,
    error_of,
    unreachable,
    why_not_ready,
)
from ortolan.client.convert import Answers, Asked
from ortolan.client.types import Answer, Event, Messages, Model, Prompt, Settings, Stats
from ortolan.errors import EngineError
from ortolan.proto.ortolan.v1 import ortolan_pb2 as pb
from ortolan.proto.ortolan.v1 import ortolan_pb2_grpc as pb_grpc


class Client:
    """A server at `address` ("host:port"). Close it, or use it as a context manager.

    Safe for use from several threads at once. retry: see RetryPolicy. tls, tls_ca, client_cert,
    client_key, api_key: see Access.
    Every method raises what the server's error stands for: RequestError, TemplateError,
    OverloadedError, AuthenticationError, TimedOutError, CancelledError; EngineError for all
    others, an absent server included.
    """

    def __init__(
        self,
        address: str,
        *,
        retry: RetryPolicy | None = None,
        **access: Unpack[AccessSettings],
    ) -> None:
        self.address = address
        self._retry = retry or RetryPolicy()
        self._access = Access(**access)
        self._channel = self._access.open_channel(grpc, address, CHANNEL_OPTIONS)
        self._stub: Any = pb_grpc.InferenceServiceStub(self._channel)

    def stream(self, prompt: Prompt, **settings: Unpack[Settings]) -> Iterator[Event]:
        """What a prompt's answers grow by; closing the iterator cancels the call."""
        return self._stream(self._stub.Generate, convert.asked_to_generate(prompt, settings))

    def stream_chat(self, messages: Messages, **settings: Unpack[Settings]) -> Iterator[Event]:
        """The same for the answer to a conversation."""
        return self._stream(self._stub.Chat, convert.asked_to_chat(messages, settings))

    def generate(self, prompt: Prompt, **settings: Unpack[Settings]) -> list[Answer]:
        """A prompt's `n` whole answers."""
        return _whole(self.stream(prompt, **settings))

    def chat(self, messages: Messages, **settings: Unpack[Settings]) -> Answer:
        """The whole answer to a conversation (the first one, if `n` asks for several)."""
        return _whole(self.stream_chat(messages, **settings))[0]

    def models(self, timeout_s: float | None = None) -> list[Model]:
        """What is served: one model."""
        asked = Asked(pb.GetModelRequest(), timeout_s)
        return [convert.model_of(self._call(self._stub.GetModel, asked))]

    def stats(self, timeout_s: float | None = None) -> Stats:
        """What the engine is doing and has done."""
        return convert.stats_of(self._call(self._stub.Stats, Asked(pb.StatsRequest(), timeout_s)))

    def tokenize(self, prompt: str | Messages, timeout_s: float | None = None) -> list[int]:
        """Token ids of a text or a conversation, as the server reads them."""
        asked = Asked(convert.tokenize_request(prompt), timeout_s)
        return list(self._call(self._stub.Tokenize, asked).token_ids)

    def detokenize(self, token_ids: Sequence[int], timeout_s: float | None = None) -> str:
        """The text of token ids, special tokens left out."""
        ids = convert.token_ids(token_ids).ids
        asked = Asked(pb.DetokenizeRequest(token_ids=ids), timeout_s)
        return str(self._call(self._stub.Detokenize, asked).text)

    def wait_ready(self, timeout_s: float = 60.0) -> None:
        """Return when the server welcomes requests. Raises TimedOutError saying why it does not."""
        deadline_s, why = time.monotonic() + timeout_s, "no answer"
        while (left_s := deadline_s - time.monotonic()) > 0:
            try:
                reply = self._stub.Stats(
                    pb.StatsRequest(), timeout=left_s, metadata=self._access.metadata
                )
            except grpc.RpcError as error:
                why = why_not_ready(error, self.address)
            else:
                if not reply.not_ready:
                    return
                why = reply.not_ready
            time.sleep(min(READY_POLL_S, left_s))
        raise unreachable(self.address, timeout_s, why)

    def close(self) -> None:
        """Cancel all calls and close the connection. Harmless a second time."""
        self._channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _call(self, method: Callable[..., Any], asked: Asked) -> Any:
        attempts = Attempts(self._retry, asked.timeout_s)
        metadata = (*asked.metadata, *self._access.metadata)
        while True:
            try:
                return method(asked.message, timeout=attempts.left_s, metadata=metadata)
            except grpc.RpcError as error:
                if (wait_s := attempts.wait_s(error)) is None:
                    raise error_of(error, self.address) from error
            except ValueError as error:  # gRPC's word for a closed channel
                raise EngineError("this client is closed; make a new one") from error
            time.sleep(wait_s)

    def _stream(self, method: Callable[..., Any], asked: Asked) -> Iterator[Event]:
        attempts = Attempts(self._retry, asked.timeout_s)
        metadata = (*asked.metadata, *self._access.metadata)
        while True:
            call, begun = None, False
            try:
                call = method(asked.message, timeout=attempts.left_s, metadata=metadata)
                for message in call:
                    begun = True
                    yield convert.event_of(message)
                return
            except grpc.RpcError as error:
                wait_s = None if begun else attempts.wait_s(error)
                if wait_s is None:
                    raise error_of(error, self.address) from error
            except ValueError as error:
                raise EngineError("this client is closed; make a new one") from error
            finally:
                if call is not None:
                    call.cancel()
            time.sleep(wait_s)


def _whole(events: Iterator[Event]) -> list[Answer]:
    answers = Answers()
    for event in events:
        answers.add(event)
    return answers.whole()
