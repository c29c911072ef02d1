"""Services behind KServe v2, and a stream of requests to one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
from grpc_serving import MockService, serving
from kserve_requests import infer_request, texts_of
from mock_engine import NAN

from ortolan.proto.inference.v2 import grpc_predict_v2_pb2 as pb
from ortolan.proto.inference.v2.grpc_predict_v2_pb2_grpc import GRPCInferenceServiceStub
from ortolan.runtime.bundle import Bundle
from ortolan.runtime.params import EngineConfig
from ortolan.runtime.serve.service import Service


class TextMock(MockService):
    """Reads a text's characters as token ids, from 5 on; an exclamation mark breaks the model."""

    async def encode(self, prompt: Any) -> list[int]:
        return [NAN if one == "!" else 5 + ord(one) % 40 for one in prompt]


@asynccontextmanager
async def mocked(**settings: Any) -> AsyncIterator[tuple[TextMock, Any]]:
    """A mock service, and a stub of it."""
    service = TextMock(**settings)
    async with serving(service) as address, grpc.aio.insecure_channel(address) as channel:
        yield service, GRPCInferenceServiceStub(channel)


@asynccontextmanager
async def tiny(bundle: Path) -> AsyncIterator[Any]:
    """A stub of a service on a real model, called tiny."""
    service = Service(Bundle.open(bundle), EngineConfig(max_slots=4), "tiny")
    await service.warm_up()
    async with serving(service) as address, grpc.aio.insecure_channel(address) as channel:
        yield GRPCInferenceServiceStub(channel)


def asked(**settings: Any) -> pb.ModelInferRequest:
    return infer_request(model="tiny", **settings)


class Stream:
    """A ModelStreamInfer call whose requests a test sends one by one."""

    def __init__(self, stub: Any, **call: Any) -> None:
        self.call = stub.ModelStreamInfer(**call)

    async def send(self, *requests: pb.ModelInferRequest) -> None:
        for request in requests:
            await self.call.write(request)

    async def end(self) -> dict[str, list[pb.ModelStreamInferResponse]]:
        """No more requests; responses by their request's id, until the call is over."""
        await self.call.done_writing()
        return await self.rest()

    async def rest(self) -> dict[str, list[pb.ModelStreamInferResponse]]:
        responses: dict[str, list[pb.ModelStreamInferResponse]] = {}
        while (response := await self.call.read()) is not grpc.aio.EOF:
            responses.setdefault(response.infer_response.id, []).append(response)
        return responses


def whole(responses: Sequence[pb.ModelStreamInferResponse]) -> list[str]:
    """The answer that responses of one request add up to, one text for each choice."""
    assert not any(response.error_message for response in responses)
    final = [r.infer_response.parameters["triton_final_response"].bool_param for r in responses]
    assert final == [False] * (len(responses) - 1) + [True]
    texts = [texts_of(response.infer_response) for response in responses]
    return ["".join(parts) for parts in zip(*texts, strict=True)]
