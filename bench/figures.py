"""The figure of `make gpu-bench`."""

from collections.abc import Sequence
from pathlib import Path

from bench.stopwatch import Row


def plot(path: Path, document: Row, times: Sequence[str]) -> None:
    """One panel per tower, one group of bars per load, milliseconds on a logarithmic axis."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - an optional dependency

    measured: list[Row] = [*document["rows"], *document["others"]]
    names = list(dict.fromkeys(row["tower"] for row in measured))
    shown = [column for column in times if any(row.get(column) is not None for row in measured)]
    if not shown:
        return
    figure = Figure(figsize=(11, 3.2 * len(names)), layout="constrained")
    for name, axes in zip(names, figure.subplots(len(names), squeeze=False)[:, 0], strict=True):
        rows = [row for row in measured if row["tower"] == name]
        width = 0.8 / len(shown)
        for number, column in enumerate(shown):
            heights = [row.get(column) or float("nan") for row in rows]
            axes.bar([x + number * width for x in range(len(rows))], heights, width, label=column.replace("_", " "))
        axes.set_xticks([x + 0.4 - width / 2 for x in range(len(rows))], [row["load"] for row in rows])
        axes.set(title=name, ylabel="ms", yscale="log")
    axes.legend(ncols=len(shown))
    figure.suptitle(f"{document['device']}, torch {document['torch']}, graphs {document['graphs']}, {document['date']}")
    figure.savefig(path, dpi=140)
