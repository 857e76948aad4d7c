"""Results of the benchmark as tables and a plot."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, fields
from pathlib import Path
from typing import Any

import numpy as np
from rich.markup import escape
from rich.table import Table

from vitwire.shared.extras import remedy
from vitwire_cli.bench.results import Run

_FEW = 50
"""Latencies that are drawn as points: a line of one of them cannot be seen."""
_BLUE, _RED, _GREY = "#1a5fb4", "#b3261e", "#888888"


def table(document: Mapping[str, object]) -> Table:
    """Two columns: names and values. Lists of dicts are left out; they have a table of their own."""
    shown = Table(show_header=False)
    shown.add_column(style="bold")
    shown.add_column(overflow="fold")
    for name, text in rows(document):
        shown.add_row(escape(name), escape(text))
    return shown


def rows(document: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Names and values, without those that are None or empty; a dict of dicts has a row for each entry."""
    for key, value in document.items():
        name = prefix + key.replace("_", " ")
        if value in (None, "", [], {}) or (isinstance(value, list) and isinstance(value[0], dict)):
            continue
        if not isinstance(value, dict):
            yield name, _text(value)
        elif any(isinstance(each, dict) for each in value.values()):
            yield from rows(value, f"{name}: ")
        else:
            known = {inner: each for inner, each in value.items() if each is not None}
            yield name, ", ".join(f"{inner.replace('_', ' ')} {_text(each)}" for inner, each in known.items())


def list_table(entries: Sequence[Any]) -> Table:
    """Dataclasses of one kind, one a row."""
    shown = Table(*(each.name.replace("_", " ") for each in fields(entries[0])))
    for entry in entries:
        shown.add_row(*("" if value is None else escape(_text(value)) for value in astuple(entry)))
    return shown


def _text(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, tuple):  # a grid
        return "x".join(map(str, value))
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def check_plot(path: Path) -> None:
    """Raises ImportError or ValueError if a plot cannot be written to `path`."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase  # noqa: PLC0415  # an optional dependency
    except ImportError:
        raise ImportError(f"--plot needs matplotlib; {remedy('plots')}") from None
    known = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix[1:].lower() not in known:
        raise ValueError(f"--plot {path}: the suffix must be one of {', '.join(known)}")
    if not path.parent.is_dir():
        raise ValueError(f"--plot {path}: {path.parent} is not a directory")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"--plot {path}: cannot be written")


def plot(path: Path, run: Run) -> None:
    """Latencies over time, and their distribution."""
    from matplotlib.figure import Figure  # noqa: PLC0415  # as above

    figure = Figure(figsize=(10, 4), layout="constrained")
    over_time, shares = figure.subplots(1, 2)
    answered, latencies = run.answered, run.latencies
    over_time.scatter([s.done for s in answered], [s.latency * 1e3 for s in answered], s=6, color=_BLUE)
    for sample in run.samples:
        if sample.error:
            over_time.axvline(sample.done, color=_RED, linewidth=0.5)
    over_time.set(xlabel="seconds", ylabel="latency, ms", title=f"{len(answered)} requests", ylim=(0, None))
    marker = "." if len(latencies) < _FEW else ""
    shares.plot(latencies, np.arange(1, len(latencies) + 1) / max(1, len(latencies)) * 100, color=_BLUE, marker=marker)
    for share in (50, 95, 99):
        shares.axhline(share, color=_GREY, linewidth=0.5, linestyle="--")
    shares.set(xlabel="latency, ms", ylabel="% of requests at most", title="distribution", ylim=(0, 100))
    figure.savefig(path, dpi=140)
