"""Scores of packings on a trace, and a reference packing for comparison: ascending and greedy, on budgets that double.

The reference is written from the published description of vLLM's encoder graphs (its pull requests 35963 and 38061):
items sorted by output tokens, packed greedily up to the largest budget and the item limit, each batch
replayed on the smallest budget that fits; items larger than every budget run eagerly, alone.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vitwire_server.core.budgets import Budget, Ladder
from vitwire_server.core.costs import ASSUMED, Timeline, Work
from vitwire_server.core.grids import Footprint
from vitwire_server.core.items import total
from vitwire_server.core.plans import Batch, Fallback, Plan


@dataclass(slots=True)
class Score:
    """Results of a packing method on a trace."""

    real: int = 0
    computed: int = 0
    launches: int = 0
    seconds: float = 0.0
    """Predicted, host and device, if each queue finds an idle engine."""
    load: Timeline = field(default_factory=Timeline)
    """The same if queues follow one another without a pause."""
    per_budget: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Items and padded tokens by budget."""
    fallbacks: Counter[Fallback] = field(default_factory=Counter)
    """Eager launches by reason."""

    @property
    def padding(self) -> float:
        """Share of padding among computed tokens."""
        return 1 - self.real / self.computed if self.computed else 0.0

    def document(self) -> dict[str, Any]:
        """The results for the JSON document."""
        return {
            "padding": round(self.padding, 6),
            "launches": self.launches,
            "eager": self.fallbacks.total(),
            "seconds": round(self.seconds, 6),
            "seconds_under_load": round(self.load.end, 6),
            "eager_launches": {str(reason): launches for reason, launches in self.fallbacks.items()},
        }

    def add(self, plan: Plan, footprints: Sequence[Footprint]) -> None:
        """Add the batches of one queue on an idle engine."""
        alone = Timeline()
        for batch in plan.batches:
            alone.run(_work(batch, footprints))
            tokens = sum(footprints[item].tokens for item in batch.items)
            size = batch.budget.tokens if batch.budget else tokens
            self.real += tokens
            self.computed += size
            self.launches += 1
            if batch.budget:
                items, padded = self.per_budget.get(size, (0, 0))
                self.per_budget[size] = (items + len(batch.items), padded + size - tokens)
            elif batch.fallback:
                self.fallbacks[batch.fallback] += 1
        self.seconds += alone.end

    def add_under_load(self, plan: Plan, footprints: Sequence[Footprint]) -> None:
        """Add the time of one queue's batches behind those before."""
        for batch in plan.batches:
            self.load.run(_work(batch, footprints))


def _work(batch: Batch, footprints: Sequence[Footprint]) -> Work:
    return ASSUMED.work(batch.budget, sum(footprints[item].tokens for item in batch.items))


def plan_ascending(footprints: Sequence[Footprint], ladder: Ladder, max_items: int) -> Plan:
    """The reference's batches of `footprints`. `ladder` must not be empty."""
    if ladder.largest is None:
        raise ValueError("the reference packing needs at least one budget")
    largest, cropped = ladder.largest.tokens, any(footprint.crops for footprint in footprints)
    batches: list[Batch] = []
    group: list[int] = []
    tokens = 0
    for item in sorted(range(len(footprints)), key=lambda i: footprints[i].tokens):
        size = footprints[item].tokens
        if size > largest or (cropped and _smallest([item], footprints, ladder) is None):
            batches.append(Batch((item,), None, Fallback.OVERSIZE))
            continue
        full = tokens + size > largest or len(group) == max_items
        if group and (full or (cropped and _smallest([*group, item], footprints, ladder) is None)):
            batches.append(Batch(tuple(group), _smallest(group, footprints, ladder)))
            group, tokens = [], 0
        group.append(item)
        tokens += size
    if group:
        batches.append(Batch(tuple(group), _smallest(group, footprints, ladder)))
    return Plan(tuple(batches))


def _smallest(group: Sequence[int], footprints: Sequence[Footprint], ladder: Ladder) -> Budget | None:
    """The smallest budget of enough tokens, and of enough overviews and crops if items have crops."""
    load = total([footprints[item] for item in group])
    return next(
        (
            budget
            for budget in ladder
            if load.tokens <= budget.tokens and (not load.crops or budget.fits(load, len(group)))
        ),
        None,
    )
