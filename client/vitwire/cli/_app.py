"""The commands put together."""

from typing import Annotated

import typer

import vitwire
from vitwire import allocator
from vitwire.cli._bench import bench
from vitwire.cli._encode import encode
from vitwire.cli._info import health, info

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.command()(encode)
app.command()(info)
app.command()(health)
app.command()(bench)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"vitwire {vitwire.__version__}")
        raise typer.Exit


@app.callback()
def options(
    _: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and leave.")
    ] = False,
) -> None:
    """Encode images with a vision encoder that runs as a service."""


def run() -> None:
    allocator.tune()
    app(prog_name="vitwire")
