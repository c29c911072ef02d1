"""`ortolan client`: a server's answers, from the command line."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ortolan.cli.access import access_options
from ortolan.cli.options import debug_option, json_option, utf8
from ortolan.cli.output import note, write, write_json, write_table
from ortolan.cli.sampling import GivenSampling, sampling_options
from ortolan.errors import UsageError

if TYPE_CHECKING:
    from ortolan.cli.answer import EventLike
    from ortolan.client.sync import Client
    from ortolan.runtime.params import SamplingParams

Function = TypeVar("Function", bound=Callable[..., Any])

DEFAULT_ADDRESS = "127.0.0.1:50051"


def _with_port(ctx: click.Context, param: click.Parameter, address: str) -> str:
    # gRPC would take port 443, and say that nobody answers there.
    if ":" not in address:
        raise click.BadParameter(f"{address!r} has no port; give HOST:PORT, as {DEFAULT_ADDRESS}")
    return address


def _address_options(command: Function) -> Function:
    address = click.option(
        "--address",
        metavar="HOST:PORT",
        default=DEFAULT_ADDRESS,
        show_default=True,
        callback=_with_port,
        help="The server's gRPC address.",
    )
    timeout = click.option(
        "--timeout",
        "timeout_s",
        metavar="S",
        type=click.FloatRange(min=0, min_open=True),
        help="Give up after so many seconds.",
    )
    tls = click.option(
        "--tls",
        is_flag=True,
        help="Use TLS with the authorities that gRPC knows; --tls-ca names others.",
    )
    return address(timeout(tls(access_options(command))))


@click.group(short_help="Ask a server over gRPC.")
def client() -> None:
    """Ask a server that `ortolan serve` runs, over gRPC."""


@client.command(short_help="Continue a prompt.")
@click.argument("prompt")
@sampling_options
@_address_options
@json_option
@debug_option
def generate(
    prompt: str, sampling: GivenSampling, timeout_s: float | None, as_json: bool, **server_at: Any
) -> None:
    """Continue PROMPT; the text is printed as it comes, its timings on standard error."""
    with _connected(**server_at) as server:
        settings = _settings(_params(server, sampling, timeout_s), timeout_s)
        _answer(lambda: server.stream(utf8(prompt, "PROMPT"), **settings), as_json)


@client.command(short_help="Talk with a model.")
@click.argument("message", required=False)
@click.option("--system", metavar="TEXT", help="The system message.")
@sampling_options
@_address_options
@json_option
@debug_option
def chat(
    message: str | None,
    system: str | None,
    sampling: GivenSampling,
    timeout_s: float | None,
    as_json: bool,
    **server_at: Any,
) -> None:
    """Answer MESSAGE, or without one talk, a line a message, as `ortolan chat` does."""
    if as_json and message is None:
        raise UsageError("--json prints one answer; give a MESSAGE")
    if system is not None:
        system = utf8(system, "--system")
    with _connected(**server_at) as server:
        params = _params(server, sampling, timeout_s)
        if message is None:
            _talk(_Remote(server, timeout_s), params, system)
            return
        messages = [{"role": "system", "content": system}] if system is not None else []
        messages.append({"role": "user", "content": utf8(message, "MESSAGE")})
        _answer(lambda: _Remote(server, timeout_s).stream_chat(messages, params), as_json)


@client.command(short_help="What a server serves.")
@_address_options
@json_option
@debug_option
def models(timeout_s: float | None, as_json: bool, **server_at: Any) -> None:
    """Show what is served and its limits."""
    with _connected(**server_at) as server:
        found = [dataclasses.asdict(model) for model in server.models(timeout_s)]
    if as_json:
        write_json(found)
        return
    for model in found:
        _show(model)


@client.command(short_help="What a server is doing.")
@_address_options
@json_option
@debug_option
def stats(timeout_s: float | None, as_json: bool, **server_at: Any) -> None:
    """Show what the engine is doing and has done since its start."""
    with _connected(**server_at) as server:
        found = dataclasses.asdict(server.stats(timeout_s))
    if as_json:
        write_json(found)
    else:
        _show(found)


@contextmanager
def _connected(address: str, tls: bool, access: dict[str, Any]) -> Iterator[Client]:
    from ortolan.client.sync import Client

    with Client(address, tls=tls, **access) as server:
        yield server


def _params(server: Client, sampling: GivenSampling, timeout_s: float | None) -> SamplingParams:
    """What the options say, over what the server's model says; see GivenSampling."""
    return sampling.over(server.models(timeout_s)[0].sampling_defaults)


def _answer(begin: Callable[[], Iterator[EventLike]], in_json: bool) -> None:
    from ortolan.cli.answer import as_json, follow

    answer = follow(begin, show=(lambda text: None) if in_json else write)
    if in_json:
        write_json(as_json(answer))
    else:
        write("\n")
        note(answer.timings())


def _talk(remote: _Remote, params: SamplingParams, system: str | None) -> None:
    from ortolan.cli.chat import HELP, Conversation

    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    if interactive:
        note(HELP)
    Conversation(remote, params, system, interactive).run()


@dataclasses.dataclass(frozen=True)
class _Remote:
    """A server where a conversation expects a model."""

    server: Client
    timeout_s: float | None

    def stream_chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams
    ) -> Iterator[EventLike]:
        return self.server.stream_chat(messages, **_settings(params, self.timeout_s))


def _settings(params: SamplingParams, timeout_s: float | None) -> dict[str, Any]:
    """Every setting as it is here, so that command line and server cannot differ on a default."""
    values = {item.name: getattr(params, item.name) for item in dataclasses.fields(params)}
    return {**values, "timeout_s": timeout_s}


def _show(values: Mapping[str, Any]) -> None:
    rows = [
        (name, json.dumps(value) if isinstance(value, dict) else str(value))
        for name, value in values.items()
    ]
    write_table(None, rows)
