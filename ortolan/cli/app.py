"""The program `ortolan`: its commands, and what becomes of an error or an interrupt."""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

import click

import ortolan
from ortolan.cli.bench import bench
from ortolan.cli.chat import chat
from ortolan.cli.client import client
from ortolan.cli.export import export
from ortolan.cli.generate import generate
from ortolan.cli.inspect import inspect
from ortolan.cli.options import Settings, debug_option
from ortolan.cli.output import (
    OutputError,
    complain,
    one_line,
    open_standard_streams,
    speak_utf8,
    warnings_shown,
)
from ortolan.cli.plan import plan
from ortolan.cli.providers import providers
from ortolan.cli.serve import serve
from ortolan.cli.verify import verify
from ortolan.errors import OrtolanError

INTERRUPTED = 128 + signal.SIGINT
# What a terminal sends when it closes does not exist on Windows.
ENDING_SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]


class Program(click.Group):
    """A group of commands that ends every error with one sentence and an exit status.

    0: done; 1: an error; 2: a wrong option or argument; 130: interrupted; 128 + N: ended by
    signal N. A traceback is for `--debug` only.
    """

    def main(  # type: ignore[override]  # its overloads tell apart a mode that is not offered
        self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any
    ) -> NoReturn:
        """Run the command line and exit."""
        open_standard_streams()
        speak_utf8()
        settings = Settings()
        with warnings_shown(), _ending_signals_as_interrupts() as ended_by:
            status = self._run(args, prog_name, settings)
        sys.exit(128 + ended_by[0] if ended_by else status)

    def _run(self, args: Sequence[str] | None, prog_name: str | None, settings: Settings) -> int:
        try:
            # windows_expand_args would replace a prompt that holds ? or * by names of files.
            result = super().main(
                args, prog_name, standalone_mode=False, windows_expand_args=False, obj=settings
            )
            sys.stdout.flush()
            return result if isinstance(result, int) else 0
        except click.Abort:  # click's word for Ctrl-C
            return INTERRUPTED
        except click.exceptions.NoArgsIsHelpError as error:
            complain(error.format_message())
            return error.exit_code
        except click.ClickException as error:
            _say_error(_click_message(error))
            return error.exit_code
        except OutputError as error:
            _leave_output_unwritten()
            _say_error(str(error))
            return error.exit_status
        except OrtolanError as error:
            _show_traceback(settings)
            _say_error(str(error))
            return error.exit_status
        except BrokenPipeError:
            # Nobody reads the output any more.
            _leave_output_unwritten()
            return 1
        except Exception as error:  # noqa: BLE001  (the last stop: nobody is shown a traceback)
            _show_traceback(settings)
            said = f" ({error})" if str(error) else ""
            hint = "" if settings.debug else "; run again with --debug to see where"
            _say_error(f"unexpected {type(error).__name__}{said}{hint}")
            return 1


def _say_error(message: str) -> None:
    complain(f"error: {one_line(message)}")


def _leave_output_unwritten() -> None:
    # The interpreter would try once more at exit, and complain.
    sys.stdout = None


def _show_traceback(settings: Settings) -> None:
    if settings.debug:
        complain(traceback.format_exc().rstrip())


def _click_message(error: click.ClickException) -> str:
    message = error.format_message()
    context = getattr(error, "ctx", None)
    if context is None:
        return message
    # click ends a message with a full stop, or with a question that suggests a name.
    message = message if message.endswith("?") else f"{message.removesuffix('.')};"
    return f"{message} see: {context.command_path} --help"


@contextmanager
def _ending_signals_as_interrupts() -> Iterator[list[int]]:
    """Let SIGTERM clean up as Ctrl-C does. Yields a list that will hold the signal's number."""
    ended_by: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        ended_by.append(number)
        raise KeyboardInterrupt

    # One that is ignored (nohup) or handled by whoever called us stays as it is.
    ours = [sig for sig in ENDING_SIGNALS if signal.getsignal(sig) is signal.SIG_DFL]
    for sig in ours:
        signal.signal(sig, end)
    try:
        yield ended_by
    finally:
        for sig in ours:
            signal.signal(sig, signal.SIG_DFL)


@click.group(cls=Program, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(ortolan.__version__, prog_name="ortolan", message="%(prog)s %(version)s")
@debug_option
def main() -> None:
    """Llama-style checkpoints as ONNX graphs, and tokens from them."""


for _command in (
    export,
    generate,
    chat,
    serve,
    client,
    inspect,
    plan,
    verify,
    providers,
    bench,
):
    main.add_command(_command)
