"""`vitwire encode`."""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from vitwire import Client, DType, Item, Model, Priority, VitwireError
from vitwire_cli.connection import INTERRUPTED, Json, PatientConnection, warn
from vitwire_cli.files import Encoded, Failed, check_decodes, check_out, found, printable, read, unique_names, write
from vitwire_flags.options import flag, with_options

_WINDOW = 16
"""Files read and sent together; bounds the memory used for them."""


@dataclass(frozen=True, slots=True)
class _Connection(PatientConnection):
    output_type: DType | None = flag(None, "Type of the embeddings on the network; default: the server's dtype.")
    priority: Priority = flag("interactive", "batch: wait behind interactive requests.")


_CONNECTION = _Connection(timeout=120.0)


@with_options
def encode(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="Images and clips of the formats that `vitwire info` lists, and folders, "
            "which are searched recursively."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="Where to write embeddings (float32): NAME.safetensors, NAME.npy for a single image, or a folder; "
            "files from different folders have the folder in their names. Without it, nothing is written."
        ),
    ] = None,
    *,
    connection: _Connection = _CONNECTION,
    as_json: Json = False,
) -> None:
    """Encode image and clip files and write their embeddings. If files fail, they are listed and the exit code is 1.

    After Ctrl-C or a failure of the service, finished embeddings are still written and the other files are listed.
    """
    with connection.client() as client:
        taken, names = found(files)
        if out is not None:
            check_out(out, len(taken))
        model = connection.model(client)
        check_decodes(model)
        unique = unique_names(list(map(printable, names)))
        outcomes, interrupted = _outcomes(_encoded(client, model, taken, unique, connection.timeout), taken)
        encoded = [each for each in outcomes if isinstance(each, Encoded)]
        failed = [each for each in outcomes if isinstance(each, Failed)]
        for broken in failed:
            warn(broken.reason)
        if out is not None and encoded:
            encoded, unwritten = write(out, encoded, model)
            for broken in unwritten:
                warn(broken.reason)
            failed = sorted(failed + unwritten, key=lambda each: each.position)
    if encoded:
        Console().print(_table(encoded, model))
        if out is None:
            warn("nothing was written: set --out to keep the embeddings")
    if as_json:
        written = printable(out) if out is not None and encoded else None
        document = {"out": written, "pooling": model.pooling, "items": [each.summary() for each in encoded]}
        typer.echo(json.dumps(document | {"failed": [each.summary() for each in failed]}))
    if interrupted or failed:
        raise typer.Exit(INTERRUPTED if interrupted else 1)


def _encoded(
    client: Client, model: Model, files: Sequence[Path], names: Sequence[str], timeout: float
) -> Iterator[Encoded | Failed]:
    """The outcome of each file as it completes. Raises VitwireError when a request fails as a whole."""
    step = min(_WINDOW, model.limits.items_per_request or _WINDOW)
    for start in range(0, len(files), step):
        items: dict[int, Item] = {}
        for at, item in enumerate(read(files[start : start + step], model, timeout), start):
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
                yield Encoded(at, files[at], names[at], result.grid, result)


def _outcomes(encoded: Iterator[Encoded | Failed], files: Sequence[Path]) -> tuple[list[Encoded | Failed], bool]:
    """The outcome of each file, in order, and whether Ctrl-C ended the command early."""
    done: dict[int, Encoded | Failed] = {}
    ended: KeyboardInterrupt | VitwireError | None = None
    columns = (TextColumn("encoding"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    quiet = len(files) == 1 or not sys.stderr.isatty()
    try:
        with Progress(*columns, console=Console(stderr=True), transient=True, disable=quiet) as progress:
            for outcome in progress.track(encoded, total=len(files)):
                done[outcome.position] = outcome
    except (KeyboardInterrupt, VitwireError) as error:
        ended = error
    reason = f"not encoded: {str(ended) or 'interrupted'}"
    outcomes = [done.get(at) or Failed.of(at, file, reason) for at, file in enumerate(files)]
    return outcomes, isinstance(ended, KeyboardInterrupt)


def _table(encoded: Sequence[Encoded], model: Model) -> Table:
    pooled = f"pooling: {model.pooling}, a row for each image or frame" if model.pooling != "none" else None
    table = Table(caption=pooled)
    table.add_column("file", overflow="fold")
    for name in ("grid", "tokens", "path", "budget", "ms"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in encoded:
        report = each.embedding.report
        table.add_row(
            Text(printable(each.file)),
            "x".join(map(str, each.grid)),
            str(each.embedding.shape[0]),
            report.path,
            str(report.budget_tokens or "-"),
            f"{each.milliseconds:.1f}",
        )
    return table
