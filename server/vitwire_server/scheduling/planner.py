"""Packing of items into batches: pure, deterministic, no device.

It looks for the fastest way to run a set of items by predicted time: one replay, several replays, or
eager forwards at the exact shape.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vitwire_server.core.budgets import Budget, Ladder
from vitwire_server.core.costs import ASSUMED, Costs
from vitwire_server.core.grids import Footprint
from vitwire_server.core.items import total
from vitwire_server.core.plans import Batch, Fallback, Plan
from vitwire_server.scheduling.packing import Options, best_fit, fill

_MOST_KEPT = 8192
"""Predictions that are kept."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds of one batch that hold for graphs and for eager forwards."""

    tokens: int
    """An item larger than this runs alone."""
    items: int
    frames: int

    def hold(self, load: Footprint, items: int) -> bool:
        """Whether so many items of summed footprint `load` may share a forward."""
        return load.tokens <= self.tokens and items <= self.items and load.segments <= self.frames


class Prediction(NamedTuple):
    """Predicted seconds of one batch."""

    forward: float
    attention: float
    """At most, for attention within segments, which `forward` leaves out."""


class Planner:
    """Items + ladder + costs to the batches of least predicted time.

    Items are packed by `fill`, which meets budgets exactly by subset sums but sees tokens only; where
    that breaks a bound on items, frames or segments, by `best_fit`, which keeps them all. Then each
    replay, and each pair of batches, is replaced by one eager forward where that is predicted to be
    cheaper. Batches run in the order of the oldest item in them.
    """

    def __init__(
        self,
        ladder: Ladder,
        bounds: Bounds,
        *,
        without_graph: Fallback,
        dropped: Ladder = Ladder(),  # noqa: B008 - immutable
        costs: Costs = ASSUMED,
    ) -> None:
        """`without_graph` is the reason given when the ladder is empty, `dropped` what could not be captured."""
        self.ladder = ladder
        self.costs = costs
        self._dropped = dropped
        self._bounds = bounds
        self._without_graph = without_graph
        self._kept: dict[int, float] = {}
        self._options = Options([budget.tokens for budget in ladder], costs.replay)

    def changed(self, ladder: Ladder, costs: Costs) -> "Planner":
        """A planner for another ladder, within the same bounds."""
        return Planner(ladder, self._bounds, without_graph=self._without_graph, dropped=self._dropped, costs=costs)

    def plan(self, footprints: Sequence[Footprint]) -> Plan:
        """Batches that hold each of `footprints` exactly once, by position."""
        captured: list[int] = []
        eager: dict[Fallback, list[int]] = {}
        for item, footprint in enumerate(footprints):
            reason = self._fallback(footprint)
            (captured if reason is None else eager.setdefault(reason, [])).append(item)
        batches = self._replays(captured, footprints)
        for reason, items in eager.items():
            groups = best_fit(items, footprints, self._bounds.hold)
            batches += [Batch(tuple(sorted(group)), None, reason) for group in groups]
        return Plan(tuple(sorted(batches, key=lambda batch: batch.items[0])))

    @property
    def capacity(self) -> int:
        """Tokens of the largest batch; a larger item runs alone."""
        return self.ladder.largest.tokens if self.ladder.largest else self._bounds.tokens

    def estimate(self, tokens: int) -> float:
        """Predicted time of so many tokens in as few batches as can hold them."""
        full, rest = divmod(tokens, self.capacity)
        return full * self._least(self.capacity) + (self._least(rest) if rest else 0.0)

    def seconds(self, batch: Batch, footprints: Sequence[Footprint]) -> float:
        """Predicted time of a batch of some of `footprints`, attention within segments left out."""
        return self._seconds(batch.budget, (footprints[item].tokens for item in batch.items))

    def predict(self, budget: Budget | None, footprints: Sequence[Footprint]) -> Prediction:
        """Predicted time of a batch of all of `footprints`."""
        forward = self._seconds(budget, (footprint.tokens for footprint in footprints))
        return Prediction(forward, self.costs.attention(footprints))

    def _seconds(self, budget: Budget | None, tokens: Iterable[int]) -> float:
        return self.costs.eager(sum(tokens)) if budget is None else self.costs.replay(budget.tokens)

    def _least(self, tokens: int) -> float:
        """Predicted time of the cheapest batch that holds `tokens`; kept, as each request asks for some."""
        if tokens not in self._kept:
            if len(self._kept) >= _MOST_KEPT:
                self._kept.clear()
            self._kept[tokens] = self._cheapest_seconds(tokens)
        return self._kept[tokens]

    def _cheapest_seconds(self, tokens: int) -> float:
        replays = (self.costs.replay(budget.tokens) for budget in self.ladder if budget.tokens >= tokens)
        return min((self.costs.eager(tokens), *replays))

    def _fallback(self, footprint: Footprint) -> Fallback | None:
        """Why no graph can take this item alone; None if one can."""
        if self.ladder.smallest_fitting(footprint, 1):
            return None
        if self._dropped.smallest_fitting(footprint, 1):
            return Fallback.NOT_CAPTURED
        if self.ladder.largest is None:
            return self._without_graph
        if footprint.segments > self.ladder.largest.max_segments:
            return Fallback.TOO_MANY_FRAMES
        return Fallback.OVERSIZE

    def _replays(self, items: list[int], footprints: Sequence[Footprint]) -> list[Batch]:
        """The cheapest batches for items that each fit a graph."""
        if not items:
            return []
        batches = self._on_budgets(fill(items, footprints, self._options), footprints)
        if batches is None:
            batches = self._on_budgets(best_fit(items, footprints, self._fits), footprints)
        assert batches is not None, "best fit keeps every bound"
        return self._with_eager(batches, footprints)

    def _fits(self, load: Footprint, items: int) -> bool:
        return self._bounds.hold(load, items) and self.ladder.smallest_fitting(load, items) is not None

    def _on_budgets(self, groups: Iterable[Sequence[int]], footprints: Sequence[Footprint]) -> list[Batch] | None:
        """Each group on its cheapest budget; None if a group breaks a bound."""
        batches: list[Batch] = []
        for group in groups:
            load = total([footprints[item] for item in group])
            budget = self._cheapest(load, len(group))
            if budget is None or not (len(group) == 1 or self._bounds.hold(load, len(group))):
                return None
            batches.append(Batch(tuple(sorted(group)), budget))
        return batches

    def _cheapest(self, load: Footprint, items: int) -> Budget | None:
        """The budget of least predicted cost that holds the load: not always the smallest one."""
        fitting = [budget for budget in self.ladder if budget.fits(load, items)]
        return min(fitting, key=lambda budget: self.costs.replay(budget.tokens), default=None)

    def _with_eager(self, batches: Iterable[Batch], footprints: Sequence[Footprint]) -> list[Batch]:
        """The batches, each or two together replaced by an eager forward where that is cheaper."""
        done: list[Batch] = []
        for batch in batches:
            cheapest = self._cheaper((batch,), footprints)
            joint = next(filter(None, (self._joint(cheapest, other, footprints) for other in done)), None)
            if joint:
                done = [other for other in done if not set(other.items) & set(joint.items)]
            done.append(joint or cheapest)
        return done

    def _joint(self, batch: Batch, other: Batch, footprints: Sequence[Footprint]) -> Batch | None:
        """Both batches as one eager forward, if bounds allow it and it is cheaper."""
        items = batch.items + other.items
        if sum(footprints[item].tokens for item in items) > self._bounds.tokens:
            return None
        if not self._bounds.hold(total([footprints[item] for item in items]), len(items)):
            return None
        joint = self._cheaper((batch, other), footprints)
        return None if joint is batch else joint

    def _cheaper(self, batches: Sequence[Batch], footprints: Sequence[Footprint]) -> Batch:
        """All of `batches` in one eager forward if that is cheaper, else the first of them."""
        items = tuple(sorted(item for batch in batches for item in batch.items))
        eager = Batch(items, None, Fallback.CHEAPER_EAGER)
        separate = sum(self.seconds(batch, footprints) for batch in batches)
        return eager if self.seconds(eager, footprints) < separate else batches[0]
