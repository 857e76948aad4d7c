"""`make bench`: planner and ladder against the packing of others, without a GPU.

The last line of stdout is one JSON document.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from bench.ascending_packing import plan_ascending, powers_of_two
from bench.report import environment, show
from bench.sizes import MERGE, footprints
from rich.console import Console

from vitwire_server.core.budgets import Ladder, budget
from vitwire_server.core.capacities import PackedCapacities
from vitwire_server.core.costs import ASSUMED
from vitwire_server.core.grids import Footprint
from vitwire_server.core.plans import Fallback
from vitwire_server.fitting.ladders import held_loads, optimal_ladder
from vitwire_server.fitting.scores import Score
from vitwire_server.fitting.traces import queues, read_trace
from vitwire_server.scheduling.planner import Bounds, Planner

LARGEST, RUNGS, ITEMS, FRAMES = 4096, 24, 64, 512
DEPTHS = (1, 4, 16, 64)
Row = dict[str, Any]


def main() -> None:
    options = _parser().parse_args()
    console = Console(width=110)
    document: Row = {"bench": "cpu", **environment(), "quick": options.quick, "planner": planner(options)}
    show(console, "planner: our ladder and packing, against ascending on powers of two", document["planner"])
    print(json.dumps(document))


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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("bench", description=__doc__)
    parser.add_argument("--trace", type=Path, help="recorded sizes to fit a ladder to, beside the shipped ones")
    parser.add_argument("--judge", type=Path, help="another recording that is packed with it; default: the same")
    parser.add_argument("--quick", action="store_true", help="small and few: shows that it runs, measures nothing")
    return parser


if __name__ == "__main__":
    main()
