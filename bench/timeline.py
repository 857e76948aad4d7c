"""A timeline of one batch from the spans of a server: receive, queue, stage in, execute, stage out, send."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench.fleet import Client, prepared

from servers import ServerProcess

COLOURS = {
    "receive": "#8da0cb",
    "queue": "#d9d9d9",
    "stage_in": "#fc8d62",
    "execute": "#e31a1c",
    "stage_out": "#fdbf6f",
    "send": "#66c2a5",
}
_CLIENTS = 4
_OTHERS = ("#a6761d", "#7570b3", "#1b9e77", "#e7298a")


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of an item; times in milliseconds."""

    name: str
    start: float
    length: float


@dataclass(frozen=True, slots=True)
class Batch:
    """The stages of each item of one batch since the first of them arrived, and medians over all items traced."""

    items: Sequence[Sequence[Stage]]
    medians: Mapping[str, float]


def traced(
    serve: Callable[[Sequence[str]], AbstractContextManager[ServerProcess]], work: Any, *, in_flight: int, calls: int
) -> Batch:
    """Trace a load on a server that `serve` starts with the flags that it is given. Raises ImportError."""
    import vitwire_server.observe.otlp  # noqa: F401, PLC0415 - what the server needs: without it, it does not start
    from collectors import collecting  # noqa: PLC0415 - needs OpenTelemetry

    with collecting() as collector:
        endpoint = collector.endpoint.removeprefix("http://")
        with ExitStack() as stack:
            server = stack.enter_context(serve(("--otlp-endpoint", endpoint)))
            count = min(in_flight, _CLIENTS)
            clients = [stack.enter_context(Client("client", target=server.target)) for _ in range(count)]
            prepared(clients, work)
            collector.spans.clear()
            for client in clients:
                client.send(run={"in_flight": in_flight // count, "calls": calls // count})
            for client in clients:
                client.answer()
            collector.wait_for(lambda span: span.name == "send", calls // count * count)
        return batch_of(collector.spans)


def batch_of(spans: Sequence[Any]) -> Batch:
    """The largest batch nearest to the middle of the load. Receiving is what precedes the queue in an RPC."""
    rpcs = {span.span_id: span for span in spans if not span.parent_span_id or span.name.endswith("/Encode")}
    items: dict[tuple[bytes, int], dict[str, Any]] = defaultdict(dict)
    for span in spans:
        number = next((each.value.int_value for each in span.attributes if each.key == "vitwire.item"), None)
        if number is not None:
            items[span.parent_span_id, number][span.name] = span
    stages = {}
    for (parent, number), own in items.items():
        if parent in rpcs and {"queue", "execute"} <= own.keys():
            begun, queued = rpcs[parent].start_time_unix_nano, own["queue"].start_time_unix_nano
            received = [Stage("receive", begun / 1e6, (queued - begun) / 1e6)]
            stages[parent, number] = received + [
                Stage(name, span.start_time_unix_nano / 1e6, _length(span)) for name, span in own.items()
            ]
    batches: dict[float, list[list[Stage]]] = defaultdict(list)
    for own_stages in stages.values():
        started = next(stage.start for stage in own_stages if stage.name == "execute")
        batches[round(started, 1)].append(own_stages)
    most = max(map(len, batches.values()))
    largest = sorted(started for started, batch in batches.items() if len(batch) == most)
    chosen = batches[largest[len(largest) // 2]]
    first = min(stage.start for item in chosen for stage in item)
    shifted = [[Stage(stage.name, stage.start - first, stage.length) for stage in item] for item in chosen]
    lengths: dict[str, list[float]] = defaultdict(list)
    for stage in (stage for item in stages.values() for stage in item):
        lengths[stage.name].append(stage.length)
    return Batch(shifted, {name: round(median(each), 3) for name, each in lengths.items()})


def _length(span: Any) -> float:
    return float((span.end_time_unix_nano - span.start_time_unix_nano) / 1e6)


def draw(batch: Batch, path: Path, title: str) -> None:
    """Write the timeline as a PNG: a row for each item, a colour for each stage."""
    import matplotlib as mpl  # noqa: PLC0415 - seconds, and only for a plot

    mpl.use("agg")
    from matplotlib import patches  # noqa: PLC0415 - as above
    from matplotlib import pyplot as plt  # noqa: PLC0415 - as above

    names = list(dict.fromkeys(stage.name for item in batch.items for stage in item))
    others = iter(_OTHERS)
    colours = {name: COLOURS.get(name) or next(others, "#000000") for name in names}
    figure, axes = plt.subplots(figsize=(11, 1.6 + 0.32 * len(batch.items)), layout="constrained")
    for row, item in enumerate(sorted(batch.items, key=lambda item: item[0].start)):
        for stage in item:
            axes.barh(row, stage.length, left=stage.start, height=0.8, color=colours[stage.name])
    handles = [patches.Patch(color=colour) for colour in colours.values()]
    figure.legend(handles, colours, ncols=len(colours), loc="outside lower center", frameon=False)
    axes.invert_yaxis()
    axes.set(xlabel="milliseconds since the first RPC of the batch began", ylabel="items of one batch", title=title)
    figure.savefig(path, dpi=110)
    plt.close(figure)
