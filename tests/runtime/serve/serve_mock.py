"""A server on the mock engine in a process of its own: argv is seconds of grace and of a step."""

from __future__ import annotations

import sys
import time

from grpc_serving import MockService

from ortolan.runtime.serve import server
from ortolan.runtime.serve.config import ServeConfig


def main() -> None:
    grace, step_s = map(float, sys.argv[1:])
    service = MockService()
    decode = service.model.decode

    def slow(*args: object) -> object:
        time.sleep(step_s)
        return decode(*args)  # type: ignore[arg-type]

    def ready(addresses: server.Addresses) -> None:
        service.model.decode = slow  # type: ignore[method-assign, assignment]
        print(addresses.grpc, flush=True)  # noqa: T201  (a test reads it)

    server.run(
        service,
        ServeConfig(grpc_port=0, http_port="off", grace=grace),
        on_ready=ready,
        say=lambda text: print(text, flush=True),  # noqa: T201
    )


main()
