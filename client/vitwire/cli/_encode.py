"""`vitwire encode`."""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from vitwire import Client, VitwireError
from vitwire._prepare import image_items
from vitwire.cli._connection import (
    DEFAULT_TARGET,
    Ca,
    Cert,
    Connection,
    Json,
    Key,
    Target,
    Timeout,
    Tls,
    Token,
    fail,
)
from vitwire.cli._output import Encoded, check_out, unique_names, write

_WINDOW = 16
"""Images prepared and sent together: bounds the pixels in memory however many files there are."""


def encode(
    files: Annotated[list[Path], typer.Argument(help="Image files.")],
    out: Annotated[
        Path | None,
        typer.Option(help="NAME.safetensors, NAME.npy for one image, or a directory of .npy files; float32."),
    ] = None,
    *,
    target: Target = DEFAULT_TARGET,
    token: Token = None,
    tls: Tls = False,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
    timeout: Timeout = 120.0,
    as_json: Json = False,
) -> None:
    """Encode image files and write their embeddings."""
    with Connection(target, token, tls, ca, cert, key, timeout).client() as client:
        if out is not None:
            check_out(out, len(files))
        encoded = sorted(_with_progress(client, files), key=lambda each: each.position)
        if out is not None:
            write(out, encoded, client.model())
    Console().print(_table(encoded))
    if as_json:
        document = {"out": None if out is None else str(out), "items": [each.summary() for each in encoded]}
        typer.echo(json.dumps(document))


def _with_progress(client: Client, files: Sequence[Path]) -> Iterator[Encoded]:
    columns = (TextColumn("encoding"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    quiet = len(files) == 1 or not sys.stderr.isatty()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=quiet) as progress:
        yield from progress.track(_encoded(client, files), total=len(files))


def _encoded(client: Client, files: Sequence[Path]) -> Iterator[Encoded]:
    """Files as they are ready."""
    names = unique_names([file.name for file in files])
    model = client.model()
    step = min(_WINDOW, model.limits.items_per_request or _WINDOW)
    for start in range(0, len(files), step):
        window = files[start : start + step]
        try:
            items = image_items(window, model)
            for index, embedding in client.iter_encode(items):
                position = start + index
                yield Encoded(position, files[position], names[position], items[index].grid, embedding)
        except VitwireError as error:
            if error.item is None or str(window[error.item]) in str(error):
                raise
            fail(f"{window[error.item]}: {error}")


def _table(encoded: Sequence[Encoded]) -> Table:
    table = Table()
    table.add_column("file", overflow="fold")
    for name in ("grid", "tokens", "path", "budget", "ms"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in encoded:
        report = each.embedding.report
        table.add_row(
            str(each.file),
            "x".join(map(str, each.grid)),
            str(each.embedding.shape[0]),
            report.path,
            str(report.budget_tokens or "-"),
            f"{each.milliseconds:.1f}",
        )
    return table
