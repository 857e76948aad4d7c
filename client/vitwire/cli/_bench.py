"""`vitwire bench`."""

import json
import math
import os
import re
import sys
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from vitwire import Item, Model
from vitwire._connections import CONNECTIONS
from vitwire._prepare import clip_items, image_items
from vitwire.cli._connection import (
    DEFAULT_TARGET,
    INTERRUPTED,
    Ca,
    Cert,
    Connection,
    Key,
    Target,
    Timeout,
    Tls,
    Token,
    Wait,
    fail,
    reported,
)
from vitwire.cli._load import Load, Pace, Sample, Summary


def bench(
    size: Annotated[
        list[str] | None,
        typer.Option(help="Size of the random images, WIDTHxHEIGHT; repeat the option to alternate between sizes."),
    ] = None,
    items: Annotated[int, typer.Option(min=1, help="Images or clips per request.")] = 1,
    frames: Annotated[int, typer.Option(min=0, help="Send clips with this many frames instead of images.")] = 0,
    concurrency: Annotated[int, typer.Option(min=1, help="Maximum requests in flight.")] = 8,
    connections: Annotated[
        int, typer.Option(min=1, help="Maximum connections; a server with several RPC processes needs several.")
    ] = CONNECTIONS,
    rate: Annotated[
        float | None,
        typer.Option(min=0.001, help="Requests per second, as a Poisson process, instead of back to back."),
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="Duration in seconds.")] = 10.0,
    requests: Annotated[int | None, typer.Option(min=1, help="Stop after this many requests.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Write a plot of the latencies to this file; PNG, SVG, … by suffix.")
    ] = None,
    *,
    repeat: Annotated[
        bool, typer.Option("--repeat", help="Send the same pixels each time, to measure the cache.")
    ] = False,
    target: Target = DEFAULT_TARGET,
    token: Token = None,
    tls: Tls = False,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
    timeout: Timeout = 60.0,
    wait: Wait = False,
) -> None:
    """Benchmark the service with random images; the last line of output is one JSON document.

    Ctrl-C stops early, shows the results so far and exits with 130.
    """
    sizes = [_size(text) for text in size or ["448x448"]]
    if rate is not None and not math.isfinite(rate):
        raise typer.BadParameter(f"{rate} is not a finite number", param_hint="--rate")
    # Retries would hide what an overloaded server refuses.
    connection = Connection(target, token, tls, ca, cert, key, timeout, wait, max_retries=0, connections=connections)
    with connection.client() as client:
        if plot:
            _check_plot(plot)
        model = connection.model(client)
        distinct = _requests(sizes, items, frames, model)
        load = Load(client, distinct, Pace(concurrency, seconds, requests, rate), fresh=not repeat)
        summary = Summary(_with_progress(load), load.samples)
    parameters = {
        "target": target,
        "model": model.model_id,
        "sizes": [f"{width}x{height}" for width, height in sizes],
        "items_per_request": items,
        "frames": frames,
        "concurrency": concurrency,
        "connections": connections,
        "rate": rate,
    }
    document = parameters | summary.document()
    Console().print(_table(document))
    typer.echo(json.dumps(document))
    if plot:
        with reported():
            _plot(plot, summary)
    if load.interrupted.is_set():
        raise typer.Exit(INTERRUPTED)
    if not summary.answered:
        fail(f"all {len(summary.samples)} requests failed")


def _size(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d{1,5})x(\d{1,5})", text)
    if found is None or "0" in (found[1], found[2]):
        raise typer.BadParameter(f"{text!r} is not WIDTHxHEIGHT", param_hint="--size")
    return int(found[1]), int(found[2])


def _requests(sizes: Sequence[tuple[int, int]], count: int, frames: int, model: Model) -> list[list[Item]]:
    """Distinct requests: enough for the cycle of sizes to repeat."""
    cycled = cycle(sizes)
    distinct = len(sizes) // math.gcd(len(sizes), count)
    return [_request(list(islice(cycled, count)), frames, model) for _ in range(distinct)]


def _request(sizes: Sequence[tuple[int, int]], frames: int, model: Model) -> list[Item]:
    """Random pixels, prepared for the model."""
    rng = np.random.default_rng(0)
    shapes = [(height, width, 3) for width, height in sizes]
    if frames:
        return clip_items([rng.integers(0, 256, (frames, *shape), np.uint8) for shape in shapes], model)
    return image_items([rng.integers(0, 256, shape, np.uint8) for shape in shapes], model)


def _with_progress(load: Load) -> float:
    columns = (
        SpinnerColumn(),
        TextColumn("{task.completed} requests, {task.fields[errors]} errors"),
        TimeElapsedColumn(),
    )
    quiet = not sys.stderr.isatty()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=quiet) as progress:
        task = progress.add_task("", total=None, errors=0)
        errors = 0

        def update(sample: Sample) -> None:
            nonlocal errors
            errors += bool(sample.error)
            progress.update(task, advance=1, errors=errors)

        load.on_sample = update
        return load.run()


def _table(document: dict[str, object]) -> Table:
    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in document.items():
        if isinstance(value, dict):
            text = ", ".join(f"{key} {each}" for key, each in value.items()) or "none"
        elif isinstance(value, list):
            text = ", ".join(map(str, value))
        else:
            text = "-" if value is None else str(value)
        table.add_row(name.replace("_", " "), escape(text))
    return table


def _check_plot(path: Path) -> None:
    """Raises ImportError or ValueError if a plot cannot be written to `path`."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase  # noqa: PLC0415  # an optional dependency
    except ImportError:
        raise ImportError("--plot needs matplotlib: pip install 'vitwire[plots]'") from None
    known = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix[1:].lower() not in known:
        raise ValueError(f"--plot {path}: the suffix must be one of {', '.join(known)}")
    if not path.parent.is_dir():
        raise ValueError(f"--plot {path}: {path.parent} is not a directory")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"--plot {path}: cannot be written")


def _plot(path: Path, summary: Summary) -> None:
    from matplotlib.figure import Figure  # noqa: PLC0415  # as above

    figure = Figure(figsize=(10, 4), layout="constrained")
    over_time, shares = figure.subplots(1, 2)
    answered, latencies = summary.answered, summary.latencies
    over_time.scatter([s.done for s in answered], [s.latency * 1e3 for s in answered], s=6, color="#1a5fb4")
    for sample in summary.samples:
        if sample.error:
            over_time.axvline(sample.done, color="#b3261e", linewidth=0.5)
    over_time.set(xlabel="seconds", ylabel="latency, ms", title=f"{len(answered)} requests", ylim=(0, None))
    shares.plot(latencies, np.arange(1, len(latencies) + 1) / max(1, len(latencies)) * 100, color="#1a5fb4")
    for share in (50, 95, 99):
        shares.axhline(share, color="#888888", linewidth=0.5, linestyle="--")
    shares.set(xlabel="latency, ms", ylabel="% of requests at most", title="distribution", ylim=(0, 100))
    figure.savefig(path, dpi=140)
