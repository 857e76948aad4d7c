"""The command-line application and its commands."""

import io
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Annotated

import typer
from typer.exceptions import TyperException

import vitwire
from vitwire.shared import allocator
from vitwire_cli.bench.command import bench
from vitwire_cli.connection import INTERRUPTED, warn
from vitwire_cli.encode import encode
from vitwire_cli.gateway import router, sglang_encoder
from vitwire_cli.info import health, info
from vitwire_cli.parity import parity
from vitwire_flags.options import message_of

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
app.command()(encode)
app.command()(info)
app.command()(health)
app.command()(bench)
app.command()(parity)
app.command()(router)
app.command()(sglang_encoder)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"vitwire {vitwire.__version__}")
        raise typer.Exit


@app.callback()
def options(
    _: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Encode images with a vision encoder that runs as a service."""


def run() -> None:
    """Run the command line on `sys.argv`; ends in SystemExit."""
    allocator.tune()
    if isinstance(sys.stdout, io.TextIOWrapper):  # None if it was closed before the start
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with _interruptible():
            raise SystemExit(app(prog_name="vitwire", standalone_mode=False))
    except TyperException as error:
        if message := message_of(error):  # none: without a command, the help was printed
            warn(message)
        raise SystemExit(error.exit_code) from None
    except OSError as error:  # commands handle errors of files and of the service; this one is from stdout
        _discard_stdout()
        warn(f"standard output: {error.strerror or error}")
        raise SystemExit(1) from None


@contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt in the block; outside, it ends the process if `vitwire_cli` set that up."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_DFL:
        yield
        return
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        yield
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def _discard_stdout() -> None:
    """Point stdout at /dev/null; else the interpreter fails again, with a traceback, when it flushes at exit."""
    with suppress(OSError, ValueError, AttributeError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
