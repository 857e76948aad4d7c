"""Packing of items into batches: pure, deterministic, no device."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from vitwire_server.core.budgets import Ladder
from vitwire_server.core.grids import Footprint
from vitwire_server.core.items import total
from vitwire_server.core.plans import Batch, Fallback, Plan


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one batch that hold for graphs and for eager forwards."""

    tokens: int
    """An item larger than this runs alone."""
    items: int
    frames: int


@dataclass(slots=True)
class _Bin:
    items: list[int] = field(default_factory=list)
    load: Footprint = field(default_factory=lambda: total(()))

    def with_item(self, footprint: Footprint) -> Footprint:
        return total((self.load, footprint))


class Planner:
    """Packs items into the fewest batches that the ladder and the limits allow.

    Best-fit decreasing (Johnson 1974: at most 11/9 of the optimal number of bins): items by
    descending tokens, each into the fullest batch that still takes it. A batch then goes to the
    smallest budget that holds it. Batches run in the order of the oldest item in them.
    """

    def __init__(self, ladder: Ladder, limits: Limits, *, without_graph: Fallback) -> None:
        """`without_graph` is the reason given when the ladder is empty."""
        self._ladder = ladder
        self._limits = limits
        self._without_graph = without_graph

    def plan(self, footprints: Sequence[Footprint]) -> Plan:
        """Batches that hold each of `footprints` exactly once, by position."""
        captured: list[_Bin] = []
        eager: dict[Fallback, list[_Bin]] = {}
        for item in sorted(range(len(footprints)), key=lambda i: (-footprints[i].tokens, i)):
            reason = self._fallback(footprints[item])
            bins = captured if reason is None else eager.setdefault(reason, [])
            self._place(item, footprints[item], bins, graph=reason is None)
        batches = [self._batch(bin_, None) for bin_ in captured]
        batches += [self._batch(bin_, reason) for reason, bins in eager.items() for bin_ in bins]
        return Plan(tuple(sorted(batches, key=lambda batch: min(batch.items))))

    def _fallback(self, footprint: Footprint) -> Fallback | None:
        """Why no graph can take this item alone; None if one can."""
        if self._ladder.largest is None:
            return self._without_graph
        if self._ladder.smallest_fitting(footprint, 1):
            return None
        if footprint.segments > self._ladder.largest.max_segments:
            return Fallback.TOO_MANY_FRAMES
        return Fallback.OVERSIZE

    def _place(self, item: int, footprint: Footprint, bins: list[_Bin], *, graph: bool) -> None:
        for bin_ in sorted(bins, key=attrgetter("load.tokens"), reverse=True):
            if self._takes(bin_.with_item(footprint), len(bin_.items) + 1, graph=graph):
                break
        else:
            bin_ = _Bin()
            bins.append(bin_)
        bin_.load = bin_.with_item(footprint)
        bin_.items.append(item)

    def _takes(self, load: Footprint, items: int, *, graph: bool) -> bool:
        if graph and self._ladder.smallest_fitting(load, items) is None:
            return False
        limits = self._limits
        return load.tokens <= limits.tokens and items <= limits.items and load.segments <= limits.frames

    def _batch(self, bin_: _Bin, reason: Fallback | None) -> Batch:
        items = tuple(sorted(bin_.items))
        if reason is not None:
            return Batch(items, None, reason)
        return Batch(items, self._ladder.smallest_fitting(bin_.load, len(items)))
