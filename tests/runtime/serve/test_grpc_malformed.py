"""What is no message at all, for every kind of method and every service of the port."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from grpc_serving import MockService, in_loop, serving

INVALID = grpc.StatusCode.INVALID_ARGUMENT

# A length that goes past the end, and a text that is not UTF-8 in the first field.
BYTES = (b"\x0a\xff\x01x", b"\x0a\x02\xff\xfe")


@pytest.mark.parametrize("message", BYTES)
@pytest.mark.parametrize(
    "method",
    [
        "/ortolan.v1.InferenceService/Generate",
        "/ortolan.v1.InferenceService/Tokenize",
        "/inference.GRPCInferenceService/ModelInfer",
        "/inference.GRPCInferenceService/ModelStreamInfer",
        "/grpc.health.v1.Health/Check",
        "/grpc.health.v1.Health/Watch",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    ],
)
@in_loop
async def test_unreadable_message_is_the_callers_error(method: str, message: bytes) -> None:
    """UNKNOWN, gRPC's own word for it, says that the server is at fault, and is tried again."""
    async with serving(MockService()) as address, grpc.aio.insecure_channel(address) as channel:
        call: Any
        if method.endswith(("StreamInfer", "ReflectionInfo")):
            call = channel.stream_stream(method)(iter([message]))
        else:
            call = channel.unary_stream(method)(message)
        with pytest.raises(grpc.aio.AioRpcError, match="cannot be read") as caught:
            async for _ in call:
                pass
    assert caught.value.code() == INVALID


@in_loop
async def test_unknown_method_is_still_unimplemented() -> None:
    async with serving(MockService()) as address, grpc.aio.insecure_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/ortolan.v1.InferenceService/Nothing")(b"")
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
