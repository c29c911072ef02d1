"""The command line: `ortolan COMMAND`, one file per command.

Modules here import only click and the standard library when they are imported; a command imports
what it needs when it runs. So `--help` is instant and works on the base install.
"""

from __future__ import annotations

from typing import NoReturn


def main() -> NoReturn:
    """Load the program and run it. Ctrl-C ends it quietly while it is being loaded, too."""
    try:
        from ortolan.cli.app import main as program
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    program()
    raise AssertionError("the program ends by exiting")


__all__ = ["main"]
