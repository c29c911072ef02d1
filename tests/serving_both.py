"""A mock service behind HTTP and gRPC on the loop of a test."""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from grpc_serving import MockService

from ortolan.runtime.serve.grpc_server import GrpcServer
from ortolan.runtime.serve.http_app import create_app
from ortolan.runtime.serve.http_server import HttpServer


@dataclass(frozen=True)
class Both:
    """grpc: its address. http: its port."""

    service: MockService
    grpc: str
    http: int

    async def call(
        self, path: str, body: object = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], str]:
        """Status, headers and body of a GET, or of a POST if there is a body."""
        return await asyncio.to_thread(self._call, path, body, headers or {})

    def _call(
        self, path: str, body: object, headers: dict[str, str]
    ) -> tuple[int, dict[str, str], str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.http, timeout=30)
        try:
            data = None if body is None else json.dumps(body).encode()
            method, kind = "GET" if data is None else "POST", {"Content-Type": "application/json"}
            connection.request(method, path, data, {**kind, **headers})
            answer = connection.getresponse()
            return answer.status, dict(answer.headers), answer.read().decode()
        finally:
            connection.close()

    async def completion(self, headers: dict[str, str] | None = None, **fields: Any) -> int:
        """The status of a completion of four tokens, greedy."""
        body = {"prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        return (await self.call("/v1/completions", {**body, **fields}, headers))[0]


@asynccontextmanager
async def serving_both(**settings: Any) -> AsyncIterator[Both]:
    """See `Both`."""
    service = MockService(**settings)
    grpc_server = GrpcServer(service, "127.0.0.1", 0)
    http_server = HttpServer(create_app(service), "127.0.0.1", 0)
    try:
        grpc_port, http_port = await grpc_server.start(), await http_server.start()
        yield Both(service, f"127.0.0.1:{grpc_port}", http_port)
    finally:
        service.gate.open()
        await service.drain(0)
        await asyncio.gather(grpc_server.stop(0), http_server.stop(0))
