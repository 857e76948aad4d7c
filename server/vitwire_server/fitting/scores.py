"""Scores of packings on a trace."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vitwire_server.core.costs import ASSUMED, Timeline, Work
from vitwire_server.core.grids import Footprint
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
