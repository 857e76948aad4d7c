"""`vitwire encode`."""

import json
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from vitwire import Client, InvalidItem, Item, Model, VitwireError
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
    tell,
)
from vitwire.cli._output import Encoded, Failed, check_out, unique_names, write

_THREADS = 8
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
    """Encode image files and write their embeddings; those that fail are named, and the exit code is 1."""
    with Connection(target, token, tls, ca, cert, key, timeout).client() as client:
        if out is not None:
            check_out(out, len(files))
        outcomes = sorted(_with_progress(client, files), key=lambda each: each.position)
        encoded = [each for each in outcomes if isinstance(each, Encoded)]
        failed = [each for each in outcomes if isinstance(each, Failed)]
        for broken in failed:
            tell(broken.reason)
        if out is not None and encoded:
            write(out, encoded, client.model())
    if encoded:
        Console().print(_table(encoded))
    if as_json:
        written = str(out) if out is not None and encoded else None
        document = {"out": written, "items": [each.summary() for each in encoded]}
        typer.echo(json.dumps(document | {"failed": [each.summary() for each in failed]}))
    if failed:
        raise typer.Exit(1)


def _with_progress(client: Client, files: Sequence[Path]) -> Iterator[Encoded | Failed]:
    columns = (TextColumn("encoding"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    quiet = len(files) == 1 or not sys.stderr.isatty()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=quiet) as progress:
        yield from progress.track(_outcomes(client, files), total=len(files))


def _outcomes(client: Client, files: Sequence[Path]) -> Iterator[Encoded | Failed]:
    """Files as they are ready, or found broken."""
    names = unique_names([file.name for file in files])
    model = client.model()
    step = min(_WINDOW, model.limits.items_per_request or _WINDOW)
    with ThreadPoolExecutor(_THREADS) as pool:
        for start in range(0, len(files), step):
            items: dict[int, Item] = {}
            prepared = pool.map(partial(_prepared, model=model), files[start : start + step])
            for at, item in enumerate(prepared, start):
                if isinstance(item, Item):
                    items[at] = item
                else:
                    yield Failed.of(at, files[at], item)
            positions = list(items)
            for index, result in client.iter_encode(list(items.values()), return_exceptions=True):
                at = positions[index]
                if isinstance(result, VitwireError):
                    yield Failed.of(at, files[at], result)
                else:
                    yield Encoded(at, files[at], names[at], items[at].grid, result)


def _prepared(file: Path, model: Model) -> Item | InvalidItem | OSError:
    try:
        (item,) = image_items([file], model)
    except (InvalidItem, OSError) as error:
        return error
    return item


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
