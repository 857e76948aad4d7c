"""`make bench`: benchmarks without a GPU. They report ratios, as absolute times depend on the machine.

Planner and ladder against the packing of others, our eager forward against plain transformers, our
framing of messages against plain protobuf. The last line of stdout is one JSON document.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from bench.ascending_packing import plan_ascending, powers_of_two
from bench.models import PUBLISHED, build, draw, items, plain, preprocessing, shrunk, square
from bench.report import environment, show
from bench.sizes import MERGE, footprints
from rich.console import Console

from vitwire import wire
from vitwire.v1 import encoder_pb2 as pb
from vitwire_server.core.budgets import Ladder, budget
from vitwire_server.core.capacities import PackedCapacities
from vitwire_server.core.costs import ASSUMED
from vitwire_server.core.grids import Footprint, Grid
from vitwire_server.core.items import Item
from vitwire_server.core.plans import Fallback
from vitwire_server.fitting.ladders import held_loads, optimal_ladder
from vitwire_server.fitting.scores import Score
from vitwire_server.fitting.traces import queues, read_trace
from vitwire_server.runtime.attention.selection import select
from vitwire_server.runtime.engine import Engine
from vitwire_server.runtime.graphs import GraphSet, SimulatedRecorder
from vitwire_server.runtime.memory.streams import HostStreams
from vitwire_server.runtime.staging import Stager
from vitwire_server.scheduling.planner import Bounds, Planner
from vitwire_server.towers.layouts.packed import PackedTower

LARGEST, RUNGS, ITEMS, FRAMES = 4096, 24, 64, 512
DEPTHS = (1, 4, 16, 64)
CPU = torch.device("cpu")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Row = dict[str, Any]


def main() -> None:
    options = _parser().parse_args()
    console = Console(width=110)
    document: Row = {"bench": "cpu", **environment(), "threads": torch.get_num_threads(), "quick": options.quick}
    if "planner" in options.parts:
        document["planner"] = planner(options)
        show(console, "planner: our ladder and packing, against ascending on powers of two", document["planner"])
    if "towers" in options.parts:
        document["towers"] = towers(quick=options.quick, repeats=options.repeats)
        show(console, "eager forward: ours over plain transformers (below 1 is faster)", document["towers"])
    if "codec" in options.parts:
        document["codec"] = codec(options)
        show(console, "framing of an item's message: plain protobuf over ours (above 1 is faster)", document["codec"])
    print(json.dumps(document))


# -- planner -----------------------------------------------------------------------------------------------


def planner(options: argparse.Namespace) -> list[Row]:
    """A ladder fitted to one window of items and evaluated on another, for each source."""
    requests = 500 if options.quick else 5000
    rows = _judged("shipped sizes", footprints(requests, 1), footprints(requests, 2))
    if options.trace:
        judged = read_trace(options.judge or options.trace, MERGE)
        rows += _judged(options.trace.name, read_trace(options.trace, MERGE), judged)
    return rows


def _judged(name: str, fitted: Sequence[Footprint], judged: Sequence[Footprint]) -> list[Row]:
    sizes = optimal_ladder(held_loads(fitted, PackedCapacities(MERGE), LARGEST), RUNGS, LARGEST, ASSUMED)
    ours, doubling = _ladder(sizes), _ladder(powers_of_two(LARGEST))
    plan = Planner(ours, Bounds(LARGEST, ITEMS, FRAMES), without_graph=Fallback.GRAPHS_OFF).plan
    return [
        _depth(name, depth, judged, plan, lambda queue, _: plan_ascending(queue, doubling, ITEMS)) for depth in DEPTHS
    ]


def _depth(
    name: str, depth: int, judged: Sequence[Footprint], ours: Callable[..., Any], theirs: Callable[..., Any]
) -> Row:
    """Both packings on the same queues."""
    row: Row = {"sizes": name, "depth": depth}
    for who, plan in (("ours", ours), ("theirs", theirs)):
        score, taken = Score(), []
        for queue in queues(judged, depth):
            start = time.perf_counter()
            made = plan(queue, 0.0)
            taken.append(time.perf_counter() - start)
            score.add(made, queue)
            score.add_under_load(plan(queue, score.load.backlog), queue)
        row |= {
            f"padding_{who}": round(score.padding, 4),
            f"launches_{who}": score.launches,
            f"seconds_{who}": round(score.seconds, 3),
            f"under_load_{who}": round(score.load.end, 3),
            f"us_per_plan_{who}": round(1e6 * median(taken), 1),
        }
    return row


def _ladder(sizes: Sequence[int]) -> Ladder:
    return Ladder(tuple(budget(size, merge=MERGE, max_items=ITEMS, max_frames=FRAMES) for size in sizes))


# -- towers ------------------------------------------------------------------------------------------------


def towers(*, quick: bool, repeats: int) -> list[Row]:
    """Vitwire's engine without graphs compared with plain transformers and sdpa, on the same weights and pixels."""
    depth, hidden = (2, 128) if quick else (6, 512)
    rows = []
    for name in ("Qwen3-VL-8B", "Qwen2.5-VL-7B"):
        model_type, fields = PUBLISHED[name]
        for label, dtype in DTYPES.items():
            small = shrunk(fields, depth, hidden)
            theirs, ours = (build(model_type, small, dtype, CPU) for _ in range(2))
            ours.rewrite()
            ours.use_attention(select("sdpa", CPU, dtype, *ours.attention_heads, captured=False).implementation)
            for load, grids in _loads(ours, quick=quick).items():
                compared = _compared(ours, theirs, grids, 1 if quick else repeats)
                rows.append({"tower": model_type, "dtype": label, "load": load, **compared})
    return rows


def _loads(tower: PackedTower, *, quick: bool) -> dict[str, list[Grid]]:
    small, middle, large = (square(tower, side) for side in (224, 448, 672))
    loads = {"224^2": [small], "packed 6x224^2 + 2x448^2": [small] * 6 + [middle] * 2}
    others = {"448^2": [middle], "8x224^2 clip": [square(tower, 224, frames=8)], "672^2": [large]}
    return loads if quick else loads | others


def _stager(tower: PackedTower) -> Stager:
    return Stager(tower.geometry, preprocessing(), tower.device)


def _engine(tower: PackedTower) -> Engine:
    return Engine(tower, GraphSet(tower, Ladder(), SimulatedRecorder()), _stager(tower), HostStreams())


def _compared(ours: PackedTower, theirs: PackedTower, grids: Sequence[Grid], repeats: int) -> Row:
    """Both paths alternately, so that a slow phase of the machine affects both."""
    pixels = draw(theirs, grids)
    batch = items(ours, grids, pixels)
    runs: list[Callable[[], Any]] = [
        lambda: plain(theirs, pixels, grids),
        partial(_encode, _engine(ours), batch),
    ]
    stock, eager = _in_turns(runs, repeats)
    return {
        "patches": len(pixels),
        "ours_over_plain_median": round(median(eager) / median(stock), 3),
        "ours_over_plain_fastest": round(min(eager) / min(stock), 3),
        "spread_plain": round(max(stock) / min(stock), 3),
    }


def _encode(engine: Engine, batch: Sequence[Item]) -> None:
    engine.launch(batch, None).collect()


def _in_turns(runs: Sequence[Callable[[], Any]], repeats: int) -> list[list[float]]:
    """Seconds of each run, after one to warm up; short ones are repeated more often, for two seconds."""
    taken: list[list[float]] = [[] for _ in runs]
    until = time.monotonic() + 2
    turn = 0
    while turn <= repeats or (turn <= 5 * repeats and time.monotonic() < until):
        for run, times in zip(runs, taken, strict=True):
            start = time.perf_counter()
            run()
            if turn:
                times.append(time.perf_counter() - start)
        turn += 1
    return taken


# -- codec -------------------------------------------------------------------------------------------------


def codec(options: argparse.Namespace) -> list[Row]:
    """Serialise and parse a large item, with pixels as a view or as bytes."""
    columns = 1536
    patches = (1 << 20 if options.quick else 12 << 20) // columns
    pixels = bytes(patches * columns)
    item = pb.Item(modality=pb.MODALITY_IMAGE, grid=pb.Grid(t=1, h=2, w=patches // 2))
    item.pixels.data_type = pb.DATA_TYPE_UINT8
    item.pixels.shape.extend((patches, columns))
    request = wire.Request(pb.EncodeRequest(items=[item]), [wire.ItemTensors(pixels)])
    raw = wire.write_request(request)
    assert raw == _protobuf_write(request.message, pixels)
    repeats = 3 if options.quick else 50
    rows = []
    for verb, runs in (
        ("write", (partial(wire.write_request, request), partial(_protobuf_write, request.message, pixels))),
        ("read", (partial(wire.read_request, raw), partial(_protobuf_read, raw))),
    ):
        ours, theirs = (median(times) for times in _in_turns(runs, repeats))
        rows.append({"verb": verb, "bytes": len(raw), "protobuf_over_ours": round(theirs / ours, 1)})
    return rows


def _protobuf_write(message: pb.EncodeRequest, pixels: bytes) -> bytes:
    whole = pb.EncodeRequest()
    whole.CopyFrom(message)
    whole.items[0].pixels.data = pixels
    return whole.SerializeToString()


def _protobuf_read(raw: bytes) -> bytes:
    return pb.EncodeRequest.FromString(raw).items[0].pixels.data


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("bench", description=__doc__)
    parts = ["planner", "towers", "codec"]
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--trace", type=Path, help="recorded sizes to fit a ladder to, beside the shipped ones")
    parser.add_argument("--judge", type=Path, help="another recording that is packed with it; default: the same")
    parser.add_argument("--repeats", type=int, default=5, help="timed forwards of each kind per row, at least")
    parser.add_argument("--quick", action="store_true", help="small and few: shows that it runs, measures nothing")
    return parser


if __name__ == "__main__":
    main()
