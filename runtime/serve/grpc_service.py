"""The service ortolan.v1.InferenceService on a `Service`."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any, TypeVar

import grpc
from google.rpc.status_pb2 import Status
from grpc_status import rpc_status

import ortolan
from ortolan.errors import OrtolanError, RequestError, TimedOutError
from ortolan.proto.ortolan.v1 import ortolan_pb2 as pb
from ortolan.proto.ortolan.v1 import ortolan_pb2_grpc as pb_grpc
from ortolan.runtime.params import MAX_CHOICES, Request
from ortolan.runtime.serve import grpc_convert as convert
from ortolan.runtime.serve.calls import current_call
from ortolan.runtime.serve.grpc_calls import REQUEST_ID
from ortolan.runtime.serve.grpc_errors import UnknownModelError, field_of, status_of, unexpected
from ortolan.runtime.serve.service import Service
from ortolan.runtime.text.no_tokenizer import NoTokenizer, no_text

_logger = logging.getLogger(__name__)

NAME = pb.DESCRIPTOR.services_by_name["InferenceService"].full_name

Context = Any  # grpc.aio.ServicerContext; the package has no types
Reply = TypeVar("Reply")
Asked = TypeVar("Asked")
Servicer = TypeVar("Servicer", bound="Calls")


class Calls:
    """What the calls of every service share. in_flight: how many are being answered now."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.in_flight = 0

    def field_of(self, message: str) -> str:
        """The field that an error's message is about, as this service calls it."""
        return field_of(message)

    @property
    def unavailable(self) -> bool:
        """Whether the service is starting, shutting down or stuck, rather than broken."""
        return self._service.not_ready is not None and self._service.stats().broken is None

    @property
    def hidden(self) -> dict[str, str]:
        """What callers need not learn -> what they are told instead: where the bundle lies."""
        return {str(self._service.bundle.path): self._service.name}

    def check_model(self, name: str) -> None:
        """Raises UnknownModelError unless it is the served model's name."""
        if name != self._service.name:
            raise UnknownModelError(
                f"the model {name[:100]!r} is not served here; {self._service.name!r} is"
            )

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """While it is open, there is something to answer: a stopping server waits for it."""
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    def status_for(self, error: Exception, method: str) -> Status:
        """What the caller is told; what nobody expected goes into the log."""
        if isinstance(error, OrtolanError):
            return status_of(
                error, unavailable=self.unavailable, hidden=self.hidden, field_of=self.field_of
            )
        # The error's own text might hold a piece of a prompt; its kind and place do not.
        place = "".join(traceback.format_tb(error.__traceback__))
        _logger.error(
            "%s failed unexpectedly: %s\n%s",
            method,
            type(error).__name__,
            place,
            extra={"request_id": _request_id()},
        )
        return unexpected()


def explained(
    method: Callable[[Servicer, Asked, Context], Awaitable[Reply]],
) -> Callable[[Servicer, Asked, Context], Coroutine[Any, Any, Reply]]:
    """The method with its request id echoed, and with every error as a status."""

    @functools.wraps(method)
    async def explained(self: Servicer, request: Asked, context: Context) -> Reply:
        try:
            await context.send_initial_metadata(((REQUEST_ID, _request_id()),))
            return await method(self, request, context)
        except grpc.aio.BaseError:
            raise
        # A cancelled call goes on being cancelled: to answer it would leak memory (grpc#43360).
        except Exception as error:
            status = self.status_for(error, method.__name__)
            await context.abort_with_status(rpc_status.to_status(status))
            raise  # never reached: abort raises

    return explained


def answered(
    method: Callable[[Servicer, Asked, Context], Awaitable[Reply]],
) -> Callable[[Servicer, Asked, Context], Coroutine[Any, Any, Reply]]:
    """The same, counted until the last word has left."""
    inner = explained(method)

    @functools.wraps(method)
    async def answered(self: Servicer, request: Asked, context: Context) -> Reply:
        with self.counted():
            return await inner(self, request, context)

    return answered


class InferenceServicer(Calls, pb_grpc.InferenceServiceServicer):
    """Answers calls of ortolan.v1."""

    @answered
    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:  # noqa: N802  (gRPC's name)
        """See ortolan.proto."""
        self.check_model(request.model or self._service.name)
        prompt = convert.prompt_of(request)
        ids = prompt if isinstance(prompt, list) else await self._service.encode(prompt)
        await self._stream(ids, request, context, continues=True)

    @answered
    async def Chat(self, request: pb.ChatRequest, context: Context) -> None:  # noqa: N802
        """See ortolan.proto."""
        self.check_model(request.model or self._service.name)
        ids = await self._service.encode_chat(convert.messages_of(request.messages))
        await self._stream(ids, request, context, continues=False)

    async def _stream(
        self,
        ids: list[int],
        request: pb.GenerateRequest | pb.ChatRequest,
        context: Context,
        *,
        continues: bool,
    ) -> None:
        options = request.options
        asked = Request(
            ids,
            self._service.params(**convert.sampling_fields(request.sampling)),
            priority=options.priority,
            timeout_s=time_left(context),
            salt=options.cache_salt,
            continues=continues,
        )
        stream = await self._service.submit(asked)
        try:
            async for event in stream:
                for message in convert.responses(event):
                    # Waits while the client does not read; meanwhile `stream` merges events.
                    await context.write(message)
        except BaseException:
            stream.cancel()  # the client is gone, cancelled, or its time is over
            raise

    @answered
    async def Tokenize(  # noqa: N802
        self, request: pb.TokenizeRequest, context: Context
    ) -> pb.TokenizeResponse:
        """See ortolan.proto."""
        self.check_model(request.model or self._service.name)
        match request.WhichOneof("input"):
            case "text":
                ids = await self._service.encode(request.text)
            case "conversation":
                messages = convert.messages_of(request.conversation.messages)
                ids = await self._service.encode_chat(messages)
            case _:
                raise RequestError("the prompt is absent; set text or conversation")
        return pb.TokenizeResponse(token_ids=ids)

    @answered
    async def Detokenize(  # noqa: N802
        self, request: pb.DetokenizeRequest, context: Context
    ) -> pb.DetokenizeResponse:
        """See ortolan.proto."""
        self.check_model(request.model or self._service.name)
        tokenizer = self._service.tokenizer
        if isinstance(tokenizer, NoTokenizer):
            raise no_text()
        ids = list(request.token_ids)
        vocab_size = self._service.manifest.model.vocab_size
        if ids and max(ids) >= vocab_size:
            raise RequestError(
                f"the prompt holds the token id {max(ids)}; the model's ids are 0 to "
                f"{vocab_size - 1}"
            )
        return pb.DetokenizeResponse(text=await asyncio.to_thread(tokenizer.decode, ids))

    @answered
    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.Model:  # noqa: N802
        """See ortolan.proto."""
        service = self._service
        has_tokenizer = not isinstance(service.tokenizer, NoTokenizer)
        return pb.Model(
            name=service.name,
            created_s=service.created_s,
            architecture=service.manifest.model.architecture,
            vocab_size=service.manifest.model.vocab_size,
            context_len=service.context,
            has_tokenizer=has_tokenizer,
            has_chat_template=has_tokenizer and "chat_template.jinja" in service.manifest.files,
            sampling_defaults=pb.SamplingParams(**service.sampling_defaults),
            max_choices=MAX_CHOICES,
            max_slots=service.config.max_slots,
            server_version=ortolan.__version__,
        )

    @answered
    async def Stats(self, request: pb.StatsRequest, context: Context) -> pb.StatsResponse:  # noqa: N802
        """See ortolan.proto."""
        return convert.stats_message(self._service.stats(), self._service.not_ready)


def _request_id() -> str:
    call = current_call()
    assert call is not None, "the server is made without CallInterceptor"
    return call.request_id


def time_left(context: Context) -> float | None:
    """Seconds until the call's deadline, or None. Raises TimedOutError if it is over."""
    left: float | None = context.time_remaining()
    if left is not None and left <= 0:
        raise TimedOutError("the call's deadline was over before it began")
    return left
