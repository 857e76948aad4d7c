"""`vitwire-server budgets`: a ladder fitted to a trace, and a judgement of one on another trace."""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, sqrt
from pathlib import Path
from typing import TextIO

from vitwire_server.core.budgets import Ladder, budget
from vitwire_server.core.costs import ASSUMED
from vitwire_server.core.grids import Footprint
from vitwire_server.core.plans import Fallback, Plan
from vitwire_server.scheduling.ascending import plan_ascending
from vitwire_server.scheduling.ladders import expected_seconds, loads, optimal_ladder, powers_of_two
from vitwire_server.scheduling.planner import Bounds, Planner
from vitwire_server.scheduling.traces import TraceError, queues, read_trace

_FRAMES = 512


@dataclass(slots=True)
class Score:
    """What a way of packing did over a trace."""

    real: int = 0
    computed: int = 0
    launches: int = 0
    eager: int = 0
    seconds: float = 0.0
    per_budget: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Items and padded tokens by budget."""

    @property
    def padding(self) -> float:
        """Share of computed tokens that no item asked for."""
        return 1 - self.real / self.computed if self.computed else 0.0

    def add(self, plan: Plan, footprints: Sequence[Footprint]) -> None:
        """Count the batches of one queue."""
        for batch in plan.batches:
            tokens = sum(footprints[item].tokens for item in batch.items)
            size = batch.budget.tokens if batch.budget else tokens
            self.real += tokens
            self.computed += size
            self.launches += 1
            self.eager += batch.budget is None
            self.seconds += ASSUMED.replay(size) if batch.budget else ASSUMED.eager(size)
            if batch.budget:
                items, padded = self.per_budget.get(size, (0, 0))
                self.per_budget[size] = (items + len(batch.items), padded + size - tokens)


def main(words: Sequence[str]) -> int:
    """Run the command; returns the exit code. The last line of stdout is one JSON document."""
    options = _parser().parse_args(words)
    try:
        return _run(options)
    except (TraceError, ValueError, OSError, ImportError) as error:
        sys.stderr.write(f"vitwire-server budgets: {error}\n")
        return 1


def _run(options: argparse.Namespace) -> int:
    trace = read_trace(options.trace, options.merge_size)
    largest = options.max_budget_tokens
    weights = loads([footprint.tokens for footprint in trace], largest)
    sizes = optimal_ladder(weights, options.count, largest, ASSUMED)
    judged = trace if options.judge is None else read_trace(options.judge, options.merge_size)
    score, reference = _judge(judged, sizes, options)
    _show(sizes, score, reference, options.queue_depth)
    gain = 1 - expected_seconds(weights, sizes, ASSUMED) / expected_seconds(weights, powers_of_two(largest), ASSUMED)
    print(f"predicted gain over powers of two at depths 1 and 4: {gain:.1%}")
    if options.out:
        options.out.write_text(json.dumps({"budgets": sizes}) + "\n", encoding="utf-8")
    if options.plot:
        _plot(options.plot, [footprint.tokens for footprint in trace], sizes)
    document = {
        "budgets": sizes,
        "padding": round(score.padding, 6),
        "launches": score.launches,
        "eager": score.eager,
        "reference": {"padding": round(reference.padding, 6), "launches": reference.launches},
        "gain": round(gain, 4),
    }
    print(json.dumps(document))
    return 0


def _judge(trace: Sequence[Footprint], sizes: Sequence[int], options: argparse.Namespace) -> tuple[Score, Score]:
    """Our planner on `sizes` and the reference on powers of two, over queues of the depth asked for."""
    merge = ceil(sqrt(max(footprint.longest / footprint.tokens for footprint in trace)))
    ladder = _ladder(sizes, merge, options)
    doubling = _ladder(powers_of_two(options.max_budget_tokens), merge, options)
    limits = Bounds(options.max_budget_tokens, options.max_items_per_batch, _FRAMES)
    planner = Planner(ladder, limits, without_graph=Fallback.GRAPHS_OFF)
    ours, theirs = Score(), Score()
    plans = options.plans.open("w", encoding="utf-8") if options.plans else None
    try:
        for number, queue in enumerate(queues(trace, options.queue_depth)):
            plan = planner.plan(queue)
            ours.add(plan, queue)
            theirs.add(plan_ascending(queue, doubling, options.max_items_per_batch), queue)
            if plans:
                _write(plans, number, plan)
    finally:
        if plans:
            plans.close()
    return ours, theirs


def _ladder(sizes: Iterable[int], merge: int, options: argparse.Namespace) -> Ladder:
    """Budgets that hold an item's segments and crops wherever they hold its tokens."""
    bounds = {"merge": max(merge, options.merge_size), "max_items": options.max_items_per_batch, "max_frames": _FRAMES}
    return Ladder(tuple(replace(budget(size, **bounds), max_crops=size) for size in sizes))


def _write(plans: TextIO, number: int, plan: Plan) -> None:
    for batch in plan.batches:
        line = {"queue": number, "items": list(batch.items), "budget": batch.budget.tokens if batch.budget else None}
        plans.write(json.dumps(line) + "\n")


def _show(sizes: Sequence[int], score: Score, reference: Score, depth: int) -> None:
    from rich.console import Console  # noqa: PLC0415 - the judgement itself needs no table
    from rich.table import Table  # noqa: PLC0415 - as above

    items = sum(count for count, _ in score.per_budget.values())
    table = Table("budget", "share of items", "padding", title=f"{len(sizes)} budgets, queues of {depth}")
    for size in sizes:
        count, padded = score.per_budget.get(size, (0, 0))
        table.add_row(str(size), f"{count / max(1, items):.1%}", f"{padded / score.computed:.2%}")
    console = Console(width=100)
    console.print(table)
    verdict = Table("packing", "padding", "launches", "eager", "predicted seconds")
    for name, each in (("this ladder and planner", score), ("ascending on powers of two", reference)):
        verdict.add_row(name, f"{each.padding:.2%}", str(each.launches), str(each.eager), f"{each.seconds:.2f}")
    console.print(verdict)


def _plot(path: Path, tokens: Sequence[int], sizes: Sequence[int]) -> None:
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - an optional dependency
    except ImportError:
        raise ImportError("--plot needs matplotlib: pip install 'vitwire[plots]'") from None
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.hist(tokens, bins=120, color="#8fb4d8", label="items")
    for position, size in enumerate(sizes):
        axes.axvline(size, color="#c0392b", linewidth=0.8, label=None if position else "budgets")
    axes.set(xlabel="tokens", ylabel="items", title=f"{len(tokens)} items, {len(sizes)} budgets")
    axes.legend()
    figure.savefig(path, dpi=140)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("vitwire-server budgets", description=__doc__)
    add = parser.add_argument
    add("--trace", type=Path, required=True, help="recorded sizes to fit the ladder to (JSON lines)")
    add(
        "--merge-size",
        type=_positive,
        default=2,
        help="side of the squares of patches that make a token, for lines without footprint",
    )
    add("--count", type=_positive, default=24, help="budgets at most")
    add("--max-budget-tokens", type=_positive, default=4096, help="tokens of the largest budget")
    add("--max-items-per-batch", type=_positive, default=64, help="items that share one forward")
    add("--out", type=Path, help="write the ladder here, for serve --budgets FILE")
    add("--plot", type=Path, help="write a plot of sizes and budgets here (PNG)")
    add("--judge", type=Path, help="run the planner over this trace instead of the fitted one")
    add("--queue-depth", type=_positive, default=1, help="items that wait together, in order of arrival")
    add("--plans", type=Path, help="write one JSON line per batch here")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return value
