"""A server on the mock engine in a process of its own; argv is JSON, see `main`."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict

from grpc_serving import MockService

from ortolan.runtime.serve import server
from ortolan.runtime.serve.config import ServeConfig
from ortolan.runtime.serve.loading import LoadingEngine


class SlowService(MockService):
    """Its model takes a while to load, and to decode a step once it is loaded."""

    def __init__(self, load_s: float, step_s: float) -> None:
        super().__init__()
        self._load_s, self._step_s = load_s, step_s
        self._loaded = self._engine
        self._engine = LoadingEngine()
        self._warm = False

    def _load(self) -> None:
        time.sleep(self._load_s)
        self._engine = self._loaded

    def slow_down(self) -> None:
        """From the end of warming up on, steps take their time."""
        decode = self.model.decode

        def slow(*args: object) -> object:
            time.sleep(self._step_s)
            return decode(*args)  # type: ignore[arg-type]

        self.model.decode = slow  # type: ignore[method-assign, assignment]


def main(*, load_s: float, step_s: float, **config: float) -> None:
    """Prints the addresses as JSON when they are listened at, then "ready"."""
    service = SlowService(load_s, step_s)

    def say(text: str) -> None:
        print(text, flush=True)  # noqa: T201  (a test reads it)

    def ready(_: server.Addresses) -> None:
        service.slow_down()
        say("ready")

    server.run(
        service,
        ServeConfig(grpc_port=0, http_port=0, **config),  # type: ignore[arg-type]
        on_listening=lambda addresses: say(json.dumps(asdict(addresses))),
        on_ready=ready,
        say=say,
    )


main(**json.loads(sys.argv[1]))
