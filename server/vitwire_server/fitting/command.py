"""`vitwire-server budgets`: fit a ladder of budgets to a trace and evaluate it, on that trace or another."""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from vitwire_server.core.budgets import Ladder
from vitwire_server.core.costs import ASSUMED
from vitwire_server.core.grids import Footprint
from vitwire_server.core.plans import Fallback
from vitwire_server.fitting.ladders import held_loads, optimal_ladder
from vitwire_server.fitting.scores import Score
from vitwire_server.fitting.traces import TraceError, capacities_of, queues, read_trace
from vitwire_server.scheduling.planner import Bounds, Planner

_FRAMES = 512


def main(words: Sequence[str]) -> int:
    """Run the command; returns the exit code. The last line of stdout is one JSON document."""
    options = _parser().parse_args(words)
    try:
        return _run(options)
    except (TraceError, ValueError, OSError) as error:
        sys.stderr.write(f"vitwire-server budgets: {error}\n")
        return 1


def _run(options: argparse.Namespace) -> int:
    trace = read_trace(options.trace, options.merge_size)
    judged = trace if options.judge is None else read_trace(options.judge, options.merge_size)
    capacities = capacities_of([*trace, *judged])
    bounds = {"max_items": options.max_items_per_batch, "max_frames": _FRAMES}
    largest = capacities.budget(options.max_budget_tokens, **bounds).tokens

    def ladder(sizes: Iterable[int]) -> Ladder:
        """The budgets that a server makes of these sizes."""
        return Ladder(tuple(sorted({capacities.budget(size, **bounds) for size in sizes})))

    weights = held_loads(trace, capacities, largest)
    sizes = optimal_ladder(weights, options.count, largest, ASSUMED)
    score = _evaluate(judged, ladder(sizes), options)
    _show(sizes, score, options.queue_depth)
    if options.out:
        options.out.write_text(json.dumps({"budgets": sizes}) + "\n", encoding="utf-8")
    if options.plot:
        _plot(options.plot, [footprint.tokens for footprint in trace], sizes)
    print(json.dumps({"budgets": sizes, **score.document()}))
    return 0


def _evaluate(trace: Sequence[Footprint], ladder: Ladder, options: argparse.Namespace) -> Score:
    """The planner's score on a ladder, with queues of `--queue-depth`."""
    limits = Bounds(options.max_budget_tokens, options.max_items_per_batch, _FRAMES)
    planner = Planner(ladder, limits, without_graph=Fallback.GRAPHS_OFF)
    score = Score()
    lines = []
    for number, queue in enumerate(queues(trace, options.queue_depth)):
        plan = planner.plan(queue)
        score.add(plan, queue)
        score.add_under_load(planner.plan(queue, score.load.backlog), queue)
        for batch in plan.batches:
            budget = batch.budget.tokens if batch.budget else None
            lines.append(json.dumps({"queue": number, "items": batch.items, "budget": budget}) + "\n")
    if options.plans:
        options.plans.write_text("".join(lines), encoding="utf-8")
    return score


def _show(sizes: Sequence[int], score: Score, depth: int) -> None:
    from rich.console import Console  # noqa: PLC0415 - only for this output
    from rich.table import Table  # noqa: PLC0415 - as above

    items = sum(count for count, _ in score.per_budget.values())
    table = Table("budget", "share of items", "padding", title=f"{len(sizes)} budgets, queues of {depth}")
    for size in sizes:
        count, padded = score.per_budget.get(size, (0, 0))
        table.add_row(str(size), f"{count / max(1, items):.1%}", f"{padded / score.computed:.2%}")
    Console(width=100).print(table)
    eager = ", ".join(f"{reason} {launches}" for reason, launches in score.fallbacks.items()) or "none"
    print(f"padding {score.padding:.2%}, {score.launches} launches, of which eager: {eager}")
    print(f"predicted seconds: {score.seconds:.2f}, under load {score.load.end:.2f}")


def _plot(path: Path, tokens: Sequence[int], sizes: Sequence[int]) -> None:
    from matplotlib.figure import Figure  # noqa: PLC0415 - of the extra [plots]

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
    add("--trace", type=Path, required=True, help="trace to fit the ladder to, as written by serve --record-trace")
    add("--merge-size", type=_positive, default=2, help="merge size of the model, for lines without a footprint")
    add("--count", type=_positive, default=24, help="maximum number of budgets")
    add("--max-budget-tokens", type=_positive, default=4096, help="tokens of the largest budget")
    add("--max-items-per-batch", type=_positive, default=64, help="maximum items per forward")
    add("--out", type=Path, help="write the ladder to this file, for serve --budgets FILE")
    add("--plot", type=Path, help="write a plot of sizes and budgets to this file (PNG)")
    add("--judge", type=Path, help="evaluate on this trace instead of the one fitted to")
    add("--queue-depth", type=_positive, default=1, help="items queued together, in order of arrival")
    add("--plans", type=Path, help="write one JSON line per batch to this file")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return value
