"""The options with which a client shows who it is and says whom it trusts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import click

Function = TypeVar("Function", bound=Callable[..., Any])

# Option -> its value in the help, help. The variable is ORTOLAN_ and the option's name.
_OPTIONS = {
    "api_key": ("KEY", "The server's key; in the variable, other users of the machine see none."),
    "tls_ca": ("FILE", "TLS: whose certificate the server must show, PEM."),
    "client_cert": ("FILE", "TLS: the certificate to show, PEM."),
    "client_key": ("FILE", "Its private key, PEM."),
}
ACCESS_OPTIONS = tuple(_OPTIONS)


def access_options(command: Function) -> Function:
    """The command receives what is given as `access`: settings of ortolan.client.access."""

    @functools.wraps(command)
    def gathered(**values: Any) -> Any:
        given = {name: values.pop(name) for name in ACCESS_OPTIONS}
        access = {name: value for name, value in given.items() if value is not None}
        return command(access=access, **values)

    for name, (metavar, text) in reversed(_OPTIONS.items()):
        click.option(
            "--" + name.replace("_", "-"),
            name,
            metavar=metavar,
            envvar=f"ORTOLAN_{name.upper()}",
            show_envvar=True,
            help=text,
        )(gathered)
    return gathered  # type: ignore[return-value]  # click calls by keyword
