"""The server's settings: flags over environment over a TOML file over defaults."""

from __future__ import annotations

import difflib
import reprlib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from pathlib import Path
from types import UnionType
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

from ortolan.errors import UsageError
from ortolan.runtime.params import MAX_THREADS, EngineConfig
from ortolan.runtime.providers.options import options_from_text

ENVIRONMENT_PREFIX = "ORTOLAN_SERVE_"

Port = int | Literal["off"]


@dataclass(frozen=True)
class ServeConfig:
    """Where to listen and how to stop.

    host: the address of this machine to listen on, for both servers.
    grpc_port, http_port: 0 takes any free port, "off" does without that server.
    model_name: what the model is called in requests; None: the bundle's folder's name.
    grace: seconds that running requests have to end after a first signal.
    port_file: a file to write the addresses to, as JSON, when requests are welcome.
    tls_cert, tls_key: PEM files, both or none; tls_client_ca: who signs clients' certificates,
    which they then must show. api_keys_file: see `api_keys.read_keys`; with it every call needs
    a key, but for what open_paths names: words of `security.OPEN_PATHS`, commas between.
    log_format, log_level: of the log on standard error.
    heartbeat_timeout: seconds that a step may take before the server calls itself not ready.
    chat_page: whether the HTTP server has a page to chat with at /.
    drain_delay: seconds between not being ready and refusing new requests, before the grace: as
    long as a load balancer may take to notice.
    self_test: whether to compare the provider with the CPU before saying ready.
    replicas: engines in this server, which share threads, weights, memory and requests; each has
    the other settings of the engine to itself.
    Raises UsageError naming the field.
    """

    host: str = "127.0.0.1"
    grpc_port: Port = 50051
    http_port: Port = 8000
    model_name: str | None = None
    grace: float = 30.0
    port_file: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_client_ca: str | None = None
    api_keys_file: str | None = None
    open_paths: str | None = None
    log_format: Literal["text", "json"] = "text"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    heartbeat_timeout: float = 30.0
    chat_page: Literal["on", "off"] = "on"
    drain_delay: float = 0.0
    self_test: Literal["on", "off"] = "off"
    replicas: int = 1

    def __post_init__(self) -> None:
        if not self.host:
            raise UsageError("host is empty; give an address, such as 127.0.0.1")
        for name in ("grpc_port", "http_port"):
            port = getattr(self, name)
            if port != "off" and not (isinstance(port, int) and 0 <= port <= 65535):
                raise UsageError(f"{name} is {port!r}; it must be from 0 to 65535, or off")
        if self.grpc_port == self.http_port == "off":
            raise UsageError("grpc_port and http_port are both off; leave one of them on")
        if self.grpc_port == self.http_port != 0:
            raise UsageError(f"http_port is {self.http_port}, as is grpc_port; give two ports")
        if not 0 <= self.grace <= 86400:
            raise UsageError(f"grace is {self.grace:g}; it must be from 0 to 86400 seconds")
        for name in ("log_format", "log_level"):
            if getattr(self, name) not in (choices := get_args(get_type_hints(ServeConfig)[name])):
                raise UsageError(
                    f"{name} is {reprlib.repr(getattr(self, name))}; it must be one of "
                    f"{', '.join(choices)}"
                )
        if not 2 <= self.heartbeat_timeout <= 86400:  # an idle engine shows life once a second
            raise UsageError(
                f"heartbeat_timeout is {self.heartbeat_timeout:g}; it must be from 2 to 86400 "
                "seconds"
            )
        if not 1 <= self.replicas <= MAX_THREADS:
            raise UsageError(f"replicas is {self.replicas}; it must be from 1 to {MAX_THREADS}")
        if not 0 <= self.drain_delay <= 3600:
            raise UsageError(
                f"drain_delay is {self.drain_delay:g}; it must be from 0 to 3600 seconds"
            )


@dataclass(frozen=True)
class Setting:
    """A setting's value, and where it came from: a flag, a variable, a file, or "default"."""

    name: str
    value: Any
    origin: str


@dataclass(frozen=True)
class Settings:
    """Everything that `ortolan serve` may be told. `listed`: all of it, in the fields' order."""

    serve: ServeConfig
    engine: EngineConfig
    listed: tuple[Setting, ...]


# Name -> type and default of every setting; no name is in both dataclasses.
_FIELDS = [(kind, item) for kind in (ServeConfig, EngineConfig) for item in fields(kind)]
TYPES = {item.name: get_type_hints(kind)[item.name] for kind, item in _FIELDS}


def _default(item: Field[Any]) -> Any:
    return item.default if item.default_factory is MISSING else item.default_factory()


DEFAULTS = {item.name: _default(item) for _, item in _FIELDS}

# Settings whose option is called otherwise: it is given once for each part of the value.
FLAGS = {"provider_options": "--provider-option"}
_WORDS = {"true": True, "on": True, "false": False, "off": False}


def gather(flags: Mapping[str, Any], environment: Mapping[str, str], file: Path | None) -> Settings:
    """Settings of all sources, the first that says something counting for each.

    flags: name -> value, None where not given. environment: all of the process's.
    Raises UsageError for unknown names, values of the wrong type and values that are refused.
    """
    found = {name: Setting(name, value, "default") for name, value in DEFAULTS.items()}
    for setting in (*_from_file(file), *_from_environment(environment)):
        found[setting.name] = setting
    for name, value in flags.items():
        if value is not None:
            found[name] = Setting(name, value, FLAGS.get(name, "--" + name.replace("_", "-")))
    try:
        serve = _made(ServeConfig, found)
        engine = _made(EngineConfig, found)
    except UsageError as error:
        name, _, rest = str(error).partition(" ")
        if name not in found or found[name].origin == "default":
            raise
        raise UsageError(f"{_shown(found[name])} {rest}") from error
    return Settings(serve, engine, tuple(found.values()))


def _shown(setting: Setting) -> str:
    if setting.origin.startswith("-"):
        return setting.origin
    return f"{setting.name} (from {setting.origin})"


def _made(kind: type[Any], found: Mapping[str, Setting]) -> Any:
    return kind(**{item.name: found[item.name].value for item in fields(kind)})


def _from_file(file: Path | None) -> list[Setting]:
    if file is None:
        return []
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{file}: cannot be read ({error.strerror})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{file}: is not TOML ({error})") from error
    except (ValueError, RecursionError) as error:  # what tomllib lets through of int's own limits
        raise UsageError(
            f"{file}: holds a number of thousands of digits, or brackets hundreds deep; "
            "no setting needs them"
        ) from error
    settings = []
    for name, value in values.items():
        if name not in TYPES:
            _unknown(f"{file}: {name}", name, tuple(TYPES))
        if not _fits(value, TYPES[name]):
            shown = reprlib.repr(value)
            raise UsageError(f"{file}: {name} is {shown}; it must be {_expected(TYPES[name])}")
        if isinstance(value, str) and "\0" in value:  # the environment and flags cannot hold it
            raise UsageError(f"{file}: {name} holds a zero character; remove it")
        settings.append(Setting(name, value, str(file)))
    return settings


def _from_environment(environment: Mapping[str, str]) -> list[Setting]:
    known = {ENVIRONMENT_PREFIX + name.upper(): name for name in TYPES}
    settings = []
    for variable, text in sorted(environment.items()):
        if not variable.startswith(ENVIRONMENT_PREFIX):
            continue
        if variable not in known:
            _unknown(variable, variable, tuple(known))
        name = known[variable]
        settings.append(Setting(name, parsed(text, TYPES[name], variable), variable))
    return settings


def _unknown(where: str, name: str, known: Sequence[str]) -> NoReturn:
    (nearest,) = difflib.get_close_matches(name, known, 1, cutoff=0)
    raise UsageError(f"{where} is no setting; did you mean {nearest}?")


def parsed(text: str, kind: Any, where: str) -> Any:
    """A value of type `kind` from text. Raises UsageError that begins with `where`."""
    for option in _options(kind):
        if get_origin(option) is Literal:
            if text in get_args(option):
                return text
        elif get_origin(option) is Mapping:
            return options_from_text(text, where)
        elif option is bool:
            if text in _WORDS:
                return _WORDS[text]
        elif option is not type(None):
            try:
                return option(text)
            except ValueError:
                pass
    raise UsageError(f"{where} is {reprlib.repr(text)}; it must be {_expected(kind)}")


def _options(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def _fits(value: object, kind: Any) -> bool:
    for option in _options(kind):
        if get_origin(option) is Literal:
            if value in get_args(option):
                return True
        elif get_origin(option) is Mapping:
            if isinstance(value, dict):  # its names and values are checked with the others
                return True
        elif option is float:
            if _is_number(value):
                return True
        elif option is bool:
            if isinstance(value, bool):
                return True
        elif isinstance(value, option) and not isinstance(value, bool):
            return True
    return False


def _is_number(value: object) -> bool:
    """Whether a float can hold it, be it infinite; TOML has whole numbers of any length."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        float(value)
    except OverflowError:
        return False
    return True


def _expected(kind: Any) -> str:
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    words: list[str] = []
    for option in _options(kind):
        if get_origin(option) is Literal:
            words += [str(choice) for choice in get_args(option)]
        elif get_origin(option) is Mapping:
            words.append("a table, such as { device_id = 1 }")
        elif option in names:
            words.append(names[option])
    return " or ".join(words)
