"""Packing of items into batches: pure, deterministic, no device.

It looks for the fastest way to run a set of items by predicted time: one replay, several replays, or
eager forwards at the exact shape.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple

from vitwire_server.core.budgets import Budget, Ladder
from vitwire_server.core.costs import ASSUMED, Costs, Work, together
from vitwire_server.core.grids import Footprint
from vitwire_server.core.items import total
from vitwire_server.core.plans import Batch, Fallback, Plan
from vitwire_server.scheduling.packing import Options, best_fit, fill

_MOST_KEPT = 8192
"""Predictions that are kept."""
_HIDDEN_HOST = 0.1
"""Price of a second of the host under load though the device hides it, as the interpreter also serves requests:
8 ms of launching are spent to save at least 0.8 ms of the device."""
_SOONER = 0.02
"""Share by which a batch may take longer in parts, so that the first parts are done sooner."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds of one batch that hold for graphs and for eager forwards."""

    tokens: int
    """An item larger than this runs alone."""
    items: int
    frames: int

    def hold(self, load: Footprint, items: int) -> bool:
        """True if `items` items of summed footprint `load` may share a forward."""
        return load.tokens <= self.tokens and items <= self.items and load.segments <= self.frames


class Prediction(NamedTuple):
    """Predicted time of one batch."""

    work: Work
    attention: float
    """Seconds, at most, for attention within segments, which `work` leaves out."""


@dataclass(slots=True)
class _Pipeline:
    """Host and device time that the batches of a plan take together."""

    start: float
    """Seconds until the device can begin."""
    price: float
    """Cost of a second of the host even while the device hides it."""
    host: float = 0.0
    device: float = 0.0

    def add(self, work: Work) -> None:
        """One batch more."""
        self.host += work.host
        self.device += work.device

    def improved(self, out: Sequence[Work], into: Work) -> bool:
        """Put `into` in the place of the batches `out` if all is then done earlier; returns whether it is."""
        host, device = self.host + into.host, self.device + into.device
        start = max(self.start, into.lead)
        for work in out:
            host -= work.host
            device -= work.device
        if self._seconds(start, host, device) >= self._seconds(self.start, self.host, self.device):
            return False
        self.start, self.host, self.device = start, host, device
        return True

    def _seconds(self, start: float, host: float, device: float) -> float:
        return max(host, start + device) + self.price * host


class Planner:
    """Items + ladder + costs to the batches of least predicted time.

    Items are packed by `fill`, which meets budgets exactly by subset sums but sees tokens only; if
    that breaks a bound on items, frames or segments, by `best_fit`, which keeps them all. Then each
    replay, and each pair of batches, is replaced by one eager forward if all batches are then
    predicted to be done earlier: the host launches one while the device computes another, so a
    device that is busy hides the host's part of an eager forward, and an idle one waits for it.
    Batches run in the order of the oldest item in them.
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
        self._least = lru_cache(_MOST_KEPT)(self._cheapest)  # each request asks for some
        self._alone = lru_cache(_MOST_KEPT)(lambda footprint: self._planned([footprint], 0.0))
        self._by_cost = _ByCost(ladder, costs)
        self._sizes = sorted({budget.tokens for budget in ladder})
        self._shorter = sorted(
            {one.max_segment_patches for one, next_ in pairwise(ladder) if one.tokens == next_.tokens}
        )
        """The longest segments of budgets for short ones."""
        self._options = Options(self._sizes, costs.replay)

    def changed(self, ladder: Ladder, costs: Costs) -> "Planner":
        """A planner for another ladder, within the same bounds."""
        return Planner(ladder, self._bounds, without_graph=self._without_graph, dropped=self._dropped, costs=costs)

    def plan(self, footprints: Sequence[Footprint], backlog: float = 0.0) -> Plan:
        """Batches that hold each of `footprints` exactly once, by position.

        The device is still busy for `backlog` predicted seconds.
        """
        if len(footprints) == 1 and not backlog:  # nothing else is in flight, and the request waits for its plan
            return self._alone(footprints[0])
        return self._planned(footprints, backlog)

    def _planned(self, footprints: Sequence[Footprint], backlog: float) -> Plan:
        captured: list[int] = []
        eager: dict[Fallback, list[int]] = {}
        for item, footprint in enumerate(footprints):
            reason = self._fallback(footprint)
            (captured if reason is None else eager.setdefault(reason, [])).append(item)
        batches = self._replays(captured, footprints)
        forced = [
            Batch(tuple(sorted(group)), None, reason)
            for reason, items in eager.items()
            for group in best_fit(items, footprints, self._bounds.hold)
        ]
        if batches:
            batches = [part for batch in batches for part in self._parts(batch, footprints)]
            batches = self._with_eager(batches, forced, footprints, backlog)
        return Plan(tuple(sorted([*batches, *forced], key=lambda batch: batch.items[0])))

    @property
    def capacity(self) -> int:
        """Tokens of the largest batch; a larger item runs alone."""
        return self.ladder.largest.tokens if self.ladder.largest else self._bounds.tokens

    def estimate(self, tokens: int) -> float:
        """Predicted time of this many tokens in as few batches as can hold them."""
        full, rest = divmod(tokens, self.capacity)
        works = [self._least(self.capacity)] if full else []
        last = [self._least(rest)] if rest else []
        return together(works + last) + max(0, full - 1) * sum(max(work.host, work.device) for work in works)

    def work(self, batch: Batch, footprints: Sequence[Footprint]) -> Work:
        """Host and device time of a batch of some of `footprints`, attention within segments left out."""
        return self.costs.work(batch.budget, sum([footprints[item].tokens for item in batch.items]))

    def predict(self, budget: Budget | None, footprints: Sequence[Footprint]) -> Prediction:
        """Predicted time of a batch of all of `footprints`."""
        work = self.costs.work(budget, sum([footprint.tokens for footprint in footprints]))
        return Prediction(work, self.costs.attention(footprints))

    def _cheapest(self, tokens: int) -> Work:
        """The cheapest batch that holds `tokens`."""
        replays = (self.costs.replay_work(budget.tokens) for budget in self.ladder if budget.tokens >= tokens)
        return min((self.costs.eager_work(tokens), *replays), key=lambda work: work.alone)

    def _fallback(self, footprint: Footprint) -> Fallback | None:
        """Why no graph can take this item alone; None if one can."""
        if self.ladder.smallest_fitting(footprint, 1):
            return None
        if self._dropped.smallest_fitting(footprint, 1):
            return Fallback.NOT_CAPTURED
        if self.ladder.largest is None:
            return self._without_graph
        if footprint.segments > max(budget.max_segments for budget in self.ladder):
            return Fallback.TOO_MANY_FRAMES
        return Fallback.OVERSIZE

    def _replays(self, items: list[int], footprints: Sequence[Footprint]) -> list[Batch]:
        """The cheapest replays for items that each fit a graph."""
        if not items:
            return []

        def fits(load: Footprint, count: int) -> bool:
            return self._bounds.hold(load, count) and self.ladder.smallest_fitting(load, count) is not None

        batches = self._on_budgets(fill(items, footprints, self._options), footprints)
        if batches and all(self._is_close(batch, footprints) for batch in batches):
            return batches
        if batches is None:
            batches = self._on_budgets(best_fit(items, footprints, fits), footprints)
        assert batches is not None, "best fit keeps every bound"
        ways = [batches, self._on_budgets(self._apart(items, footprints), footprints) or batches]
        return min(ways, key=lambda way: sum(self._occupied(batch, footprints) for batch in way))

    def _is_close(self, batch: Batch, footprints: Sequence[Footprint]) -> bool:
        """Whether no smaller budget has enough tokens, only for other bounds."""
        tokens = sum([footprints[item].tokens for item in batch.items])
        return batch.budget is not None and batch.budget.tokens == self._sizes[bisect_left(self._sizes, tokens)]

    def _apart(self, items: Iterable[int], footprints: Sequence[Footprint]) -> list[list[int]]:
        """Groups of items that the same budgets for short segments hold: those for longer ones have few slots."""

        def kind(item: int) -> int:
            return bisect_left(self._shorter, footprints[item].longest)

        alike = [list(same) for _, same in groupby(sorted(items, key=kind), kind)]
        return [group for same in alike for group in fill(same, footprints, self._options)]

    def _on_budgets(self, groups: Iterable[Sequence[int]], footprints: Sequence[Footprint]) -> list[Batch] | None:
        """Each group on its cheapest budget; None if a group breaks a bound."""
        batches: list[Batch] = []
        for group in groups:
            load = total([footprints[item] for item in group])
            budget = self._by_cost.first_fitting(load, len(group))
            if budget is None or not (len(group) == 1 or self._bounds.hold(load, len(group))):
                return None
            batches.append(Batch(tuple(sorted(group)), budget))
        return batches

    def _with_eager(
        self, batches: Iterable[Batch], forced: Iterable[Batch], footprints: Sequence[Footprint], backlog: float
    ) -> list[Batch]:
        """Replays, each or two together replaced by an eager forward if that is cheaper; `forced` run as well."""
        works = [(batch, self.work(batch, footprints)) for batch in batches]
        pipeline = _Pipeline(max(backlog, works[0][1].lead), _HIDDEN_HOST if backlog else 0.0)
        for _, work in works:
            pipeline.add(work)
        for batch in forced:
            pipeline.add(self.work(batch, footprints))
        done: list[tuple[Batch, Work]] = []
        for batch, work in works:
            cheapest = self._improved(pipeline, ((batch, work),), footprints) or (batch, work)
            for position, other in enumerate(done):
                if joint := self._improved(pipeline, (cheapest, other), footprints):
                    del done[position]
                    cheapest = joint
                    break
            done.append(cheapest)
        return [batch for batch, _ in done]

    def _parts(self, batch: Batch, footprints: Sequence[Footprint], seconds: float = 0.0) -> list[Batch]:
        """The older and the younger half of a batch, halved further, while replays of the parts take at most `seconds`.

        By default, that is `1 + _SOONER` times what the whole batch takes.
        """
        items = batch.items
        if len(items) == 1:
            return [batch]
        halves = self._on_budgets((items[: len(items) // 2], items[len(items) // 2 :]), footprints)
        if halves is None:
            return [batch]
        seconds = seconds or (1 + _SOONER) * self._occupied(batch, footprints)
        taken = [self._occupied(half, footprints) for half in halves]
        if sum(taken) > seconds:
            return [batch]
        share = seconds / sum(taken)
        parts = (self._parts(half, footprints, share * time) for half, time in zip(halves, taken, strict=True))
        return [part for each in parts for part in each]

    def _occupied(self, batch: Batch, footprints: Sequence[Footprint]) -> float:
        """Seconds that a batch occupies a busy engine, plus `_HIDDEN_HOST` of the host's seconds."""
        work = self.work(batch, footprints)
        return max(work.host, work.device) + _HIDDEN_HOST * work.host

    def _improved(
        self, pipeline: _Pipeline, batches: Sequence[tuple[Batch, Work]], footprints: Sequence[Footprint]
    ) -> tuple[Batch, Work] | None:
        """All of `batches` as one eager forward, if bounds allow it and all is then done earlier."""
        items = [item for batch, _ in batches for item in batch.items]
        chosen = [footprints[item] for item in items]
        tokens = sum([footprint.tokens for footprint in chosen])
        if len(batches) > 1 and not (tokens <= self._bounds.tokens and self._bounds.hold(total(chosen), len(chosen))):
            return None
        work = self.costs.eager_work(tokens)
        if not pipeline.improved([each for _, each in batches], work):
            return None
        return Batch(tuple(sorted(items)), None, Fallback.CHEAPER_EAGER), work


class _ByCost:
    """The budgets of a ladder, cheapest first."""

    def __init__(self, ladder: Ladder, costs: Costs) -> None:
        self._budgets = sorted(ladder, key=lambda budget: (costs.work(budget, 0).device, budget))
        self._largest = list(accumulate((budget.tokens for budget in self._budgets), max))
        """The most tokens of the budgets up to each."""

    def first_fitting(self, load: Footprint, items: int) -> Budget | None:
        """The budget of least predicted cost that holds the load: not always the smallest one."""
        for position in range(bisect_left(self._largest, load.tokens), len(self._budgets)):
            if self._budgets[position].fits(load, items):
                return self._budgets[position]
        return None
