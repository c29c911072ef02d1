"""The service inference.GRPCInferenceService, which is KServe v2, on a `Service`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable

import grpc

import ortolan
from ortolan.errors import RequestError
from ortolan.proto.inference.v2 import grpc_predict_v2_pb2 as pb
from ortolan.proto.inference.v2 import grpc_predict_v2_pb2_grpc as pb_grpc
from ortolan.runtime.params import Request
from ortolan.runtime.serve import kserve_call
from ortolan.runtime.serve.grpc_errors import UnknownModelError
from ortolan.runtime.serve.grpc_service import Calls, Context, answered, explained, time_left
from ortolan.runtime.serve.kserve_answer import Answer
from ortolan.runtime.serve.kserve_call import (
    INPUTS,
    MAX_ID_CHARACTERS,
    OUTPUTS,
    InferCall,
    read_call,
)
from ortolan.runtime.serve.kserve_tensors import shown

NAME = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name

# A bundle has no versions; clients that want one get this.
VERSION = "1"
# Requests of one stream that are answered at once; the client's next ones are not read until then.
# Many connections get as far as the engine's queue lets them.
_MOST_AT_ONCE = 128

Write = Callable[[pb.ModelStreamInferResponse], Awaitable[None]]


class KServeServicer(Calls, pb_grpc.GRPCInferenceServiceServicer):
    """Answers calls of the Open Inference Protocol; see grpc_predict_v2.proto."""

    def field_of(self, message: str) -> str:
        """The field that an error's message is about, as this protocol calls it."""
        return kserve_call.field_of(message)

    @answered
    async def ServerLive(  # noqa: N802  (gRPC's name)
        self, request: pb.ServerLiveRequest, context: Context
    ) -> pb.ServerLiveResponse:
        """That this is answered is the answer."""
        return pb.ServerLiveResponse(live=True)

    @answered
    async def ServerReady(  # noqa: N802
        self, request: pb.ServerReadyRequest, context: Context
    ) -> pb.ServerReadyResponse:
        """Whether requests are welcome."""
        return pb.ServerReadyResponse(ready=self._service.not_ready is None)

    @answered
    async def ModelReady(  # noqa: N802
        self, request: pb.ModelReadyRequest, context: Context
    ) -> pb.ModelReadyResponse:
        """The same, of the one model."""
        self._check(request.name, request.version)
        return pb.ModelReadyResponse(ready=self._service.not_ready is None)

    @answered
    async def ServerMetadata(  # noqa: N802
        self, request: pb.ServerMetadataRequest, context: Context
    ) -> pb.ServerMetadataResponse:
        """Which server this is."""
        return pb.ServerMetadataResponse(
            name="ortolan",
            version=ortolan.__version__,
            extensions=["parameters", "schedule_policy"],
        )

    @answered
    async def ModelMetadata(  # noqa: N802
        self, request: pb.ModelMetadataRequest, context: Context
    ) -> pb.ModelMetadataResponse:
        """The model's tensors. Settings that several datatypes can hold are listed with one."""
        self._check(request.name, request.version)
        metadata = pb.ModelMetadataResponse(
            name=self._service.name, versions=[VERSION], platform="ortolan"
        )
        for name, kind in INPUTS.items():
            shape = -1 if kind.many else 1
            metadata.inputs.add(name=name, datatype=kind.usual, shape=[shape])
        for name, datatype in OUTPUTS.items():
            shape = 1 if name in ("num_input_tokens", "num_cached_tokens") else -1
            metadata.outputs.add(name=name, datatype=datatype, shape=[shape])
        return metadata

    @answered
    async def ModelInfer(  # noqa: N802
        self, request: pb.ModelInferRequest, context: Context
    ) -> pb.ModelInferResponse:
        """The whole answer in one response."""
        call = self._read(request)
        if call.stream:
            raise RequestError(
                "stream is true; ModelInfer gives one response, ModelStreamInfer gives many"
            )
        async with contextlib.aclosing(self._responses(request, call, context)) as responses:
            return await anext(responses)

    @explained  # not counted: a client may hold it open with nothing to answer
    async def ModelStreamInfer(  # noqa: N802
        self, requests: AsyncIterator[pb.ModelInferRequest], context: Context
    ) -> None:
        """Answers many requests at once. An error of one of them goes into its last response."""
        room = asyncio.Semaphore(_MOST_AT_ONCE)
        lock = asyncio.Lock()  # one message at a time is what gRPC takes
        tasks: set[asyncio.Task[None]] = set()

        async def write(message: pb.ModelStreamInferResponse) -> None:
            async with lock:
                await context.write(message)

        async def answer(request: pb.ModelInferRequest) -> None:
            try:
                # Of a call that is over, nobody is left to be told.
                with self.counted(), contextlib.suppress(grpc.aio.BaseError):
                    await self._answer(request, context, write)
            finally:
                room.release()

        try:
            async for request in requests:
                await room.acquire()
                tasks.add(task := asyncio.create_task(answer(request)))
                task.add_done_callback(tasks.discard)
            while tasks:
                await asyncio.wait(tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _answer(self, request: pb.ModelInferRequest, context: Context, write: Write) -> None:
        """One request of a stream."""
        try:
            call = self._read(request)
            async with contextlib.aclosing(self._responses(request, call, context)) as responses:
                async for response in responses:
                    await write(pb.ModelStreamInferResponse(infer_response=response))
        except grpc.aio.BaseError:
            raise
        except Exception as error:  # noqa: BLE001  any fault must end this request, and it alone
            failed = self._head(request)
            failed.parameters["triton_final_response"].bool_param = True
            status = self.status_for(error, "ModelStreamInfer")
            await write(
                pb.ModelStreamInferResponse(error_message=status.message, infer_response=failed)
            )

    async def _responses(
        self, request: pb.ModelInferRequest, call: InferCall, context: Context
    ) -> AsyncGenerator[pb.ModelInferResponse, None]:
        """One response for each event, or one for all."""
        service = self._service
        params = service.params(**call.sampling)
        ids = await service.encode(call.prompt)
        times = [time for time in (time_left(context), call.timeout_s) if time is not None]
        asked = Request(
            ids,
            params,
            priority=call.priority,
            timeout_s=min(times, default=None),
            salt=call.salt,
        )
        answer = Answer(call, self._head(request), params.n, len(ids))
        stream = await service.submit(asked)
        try:
            async for event in stream:
                answer.add(event)
                if call.stream or answer.done:
                    response = answer.response()
                    response.parameters["triton_final_response"].bool_param = answer.done
                    yield response
        except BaseException:
            stream.cancel()  # the client is gone, cancelled, or its time is over
            raise

    def _read(self, request: pb.ModelInferRequest) -> InferCall:
        self._check(request.model_name, request.model_version)
        return read_call(request)

    def _check(self, name: str, version: str) -> None:
        """Raises UnknownModelError unless this model and version are served."""
        self.check_model(name)
        if version not in ("", VERSION):
            raise UnknownModelError(
                f"model_version {shown(version)} is not served here; {VERSION!r} is"
            )

    def _head(self, request: pb.ModelInferRequest) -> pb.ModelInferResponse:
        return pb.ModelInferResponse(
            model_name=self._service.name, model_version=VERSION, id=request.id[:MAX_ID_CHARACTERS]
        )
