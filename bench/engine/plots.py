"""Plots of an engine's benchmark."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.engine.answers import Row

COLOURS = {"local": "#4c72b0", "again": "#a6bddb", "inline": "#dd8452", "reference": "#55a868", "text": "#8c8c8c"}
_MOMENTS = {
    "encoded": "#8da0cb",
    "accepted": "#e78ac3",
    "submitted": "#a6d854",
    "queued": "#ffd92f",
    "stored": "#e31a1c",
    "scheduled": "#fc8d62",
    "prefilled": "#66c2a5",
    "first_token": "#333333",
}


def plot(document: Mapping[str, Any], path: Path) -> None:
    """Write a PNG: TTFT and requests per second of each stream and the moments of requests, or times of towers."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - an optional dependency

    if "towers" in document:
        figure = Figure(figsize=(10, 5), layout="constrained")
        _towers(figure.subplots(), document["towers"])
        figure.suptitle(f"{document['device']}, {document['engine']}, {document['date']}")
        figure.savefig(path, dpi=140)
        return
    streams, moments = document.get("streams", []), document.get("timeline", [])
    figure = Figure(figsize=(13, 9), layout="constrained")
    parts: Any = figure.subfigures(2, 1)
    upper, lower = parts
    first, second = upper.subplots(1, 2)
    _bars(first, streams, "ttft_p50_ms", "time to the first token, median, ms")
    _bars(second, streams, "requests_per_s", "requests per second")
    first.set_yscale("log")
    _moments(lower.subplots(), moments)
    figure.suptitle(f"{document['device']}, {document['engine']}, {document['date']}")
    figure.savefig(path, dpi=140)


def _bars(axes: Any, streams: Sequence[Row], column: str, title: str) -> None:
    places = list(dict.fromkeys(_place(row) for row in streams))
    ways = list(dict.fromkeys(row["way"] for row in streams))
    width = 0.8 / max(1, len(ways))
    for index, way in enumerate(ways):
        rows = [row for row in streams if row["way"] == way and column in row]
        spots = [places.index(_place(row)) + (index + 0.5) * width - 0.4 for row in rows]
        axes.bar(spots, [row[column] for row in rows], width, label=way, color=COLOURS[way])
    axes.set_xticks(range(len(places)), places)
    axes.set(title=title)
    axes.legend()


def _towers(axes: Any, rows: Sequence[Row]) -> None:
    sizes, towers = (list(dict.fromkeys(row[name] for row in rows)) for name in ("size", "tower"))
    width = 0.8 / max(1, len(towers))
    for index, tower in enumerate(towers):
        own = [row for row in rows if row["tower"] == tower]
        spots = [sizes.index(row["size"]) + (index + 0.5) * width - 0.4 for row in own]
        bars = axes.bar(spots, [row["device_ms"] for row in own], width, label=tower)
        axes.bar_label(bars, fmt="%.3g", fontsize=7)
    axes.set_xticks(range(len(sizes)), sizes)
    axes.set(title="one forward on the device, median, ms", yscale="log")
    axes.legend()


def _moments(axes: Any, rows: Sequence[Row]) -> None:
    """A line for each stream, a point for each moment."""
    for height, row in enumerate(rows):
        reached = {name: row[name] for name in _MOMENTS if name in row}
        axes.plot([0, max(reached.values(), default=0)], [height, height], color="#cccccc", zorder=1)
        for name, value in reached.items():
            axes.scatter(value, height, color=_MOMENTS[name], zorder=2)
    handles = [axes.scatter([], [], color=colour, label=name) for name, colour in _MOMENTS.items()]
    axes.legend(handles=handles, ncols=len(handles), loc="upper center", bbox_to_anchor=(0.5, -0.08), frameon=False)
    axes.set_yticks(range(len(rows)), [f"{row['way']} {_place(row)}" for row in rows])
    axes.set(title="milliseconds since the start of a request, medians", xscale="symlog")
    axes.invert_yaxis()


def _place(row: Row) -> str:
    return f"{row['size']} {row['load']}"
