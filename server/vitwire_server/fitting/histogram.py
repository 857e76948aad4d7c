"""The loads that a server plans, as a histogram in which older ones fade: sizes only, never pixels."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vitwire_server.core.budgets import Budget
from vitwire_server.core.capacities import Capacities
from vitwire_server.core.grids import Footprint
from vitwire_server.core.items import total

HALF_LIFE = 2048
"""Loads after which a load counts half."""
_MOST = 1024
"""Distinct loads that are kept; the lightest are dropped beyond it."""
_STEPS_PER_DOUBLING = 64
_RENORMALISED_AT = 1e12
_FEW_ITEMS = 4
"""Of more items than this the planner chooses those that fill a budget, so their sum is not a demand."""


class LoadHistogram:
    """Weights of loads, by the tokens of the budget that would suit them exactly. Used by one thread."""

    def __init__(self, loads: Mapping[int, float] | None = None) -> None:
        """Begins with the `loads` of another histogram."""
        self._weights = dict(loads or {})
        self._unit = 1.0
        """The weight of a load that is added now; grows instead of all others shrinking."""
        self.added = 0
        """Loads that were added."""

    def add(self, tokens: int, weight: float = 1.0) -> None:
        """Count a load."""
        self.added += 1
        self._unit *= 2 ** (1 / HALF_LIFE)
        self._weights[tokens] = self._weights.get(tokens, 0.0) + weight * self._unit
        if self._unit > _RENORMALISED_AT or len(self._weights) > _MOST:
            self._tidy()

    @property
    def loads(self) -> dict[int, float]:
        """A copy of the weights, in units of a load that is added now."""
        return {tokens: weight / self._unit for tokens, weight in self._weights.items()}

    def _tidy(self) -> None:
        heaviest = sorted(self.loads.items(), key=lambda load: -load[1])[: _MOST * 3 // 4]
        self._weights, self._unit = dict(heaviest), 1.0


@dataclass(frozen=True, slots=True)
class Demands:
    """Which budget the loads of a tower would need."""

    capacities: Capacities
    largest: int
    """Tokens of the largest budget."""
    max_items: int
    max_frames: int

    def budget(self, tokens: int) -> Budget:
        """The budget that the tower has for so many tokens."""
        return self.capacities.budget(tokens, max_items=self.max_items, max_frames=self.max_frames)

    def of(self, window: Sequence[Footprint], taken: int) -> int | None:
        """Tokens of the budget for the items that waited together, of which the batch took `taken`.

        None if no budget holds them, or if the planner could choose among many.
        """
        if taken < len(window) > _FEW_ITEMS:
            return None
        return self.needed(total(window), len(window))

    def needed(self, load: Footprint, items: int) -> int | None:
        """Tokens of the smallest budget for a load, rounded up by at most 2 %; None if none holds it."""
        size = self.capacities.needed(load)
        while size is not None and size <= self.largest:
            rounded = min(self.largest, rounded_up(size))
            for candidate in (rounded, size):
                if (budget := self.budget(candidate)).fits(load, items):
                    return budget.tokens
            size = max(size + 1, size * 9 // 8)
        return None


def rounded_up(tokens: int) -> int:
    """The next of about 64 sizes per doubling; below 128 every number is one."""
    step = max(1, 1 << max(0, tokens.bit_length() - _STEPS_PER_DOUBLING.bit_length()))
    return -(-tokens // step) * step


def is_histogram(loads: Mapping[int, float], largest: int) -> bool:
    """Whether read weights may be those of a histogram."""
    return len(loads) <= _MOST and all(0 < size <= largest and 0 <= loads[size] < _RENORMALISED_AT for size in loads)
