"""Snapshots of the metrics, and their history over the last minutes, for the status page."""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

EVERY_SECONDS = 2.0
KEPT_SECONDS = 300.0
_METHODS = ("Encode", "EncodeStream")
"""RPCs with items, whose latency is shown."""
Labels = Mapping[str, str]


class Readings:
    """A snapshot of all samples of a registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.time = time.time()
        self._samples: dict[str, list[tuple[Labels, float]]] = {}
        for family in registry.collect():
            for sample in family.samples:
                self._samples.setdefault(sample.name, []).append((sample.labels, sample.value))

    def total(self, name: str, **labels: str) -> float:
        """The sum of the samples with these labels; 0 without any."""
        return sum(value for found, value in self._samples.get(name, []) if labels.items() <= found.items())

    def by(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """Sums by the value of a label, in the order of their first appearance."""
        sums: dict[str, float] = {}
        for found, value in self._samples.get(name, []):
            if labels.items() <= found.items():
                sums[found[label]] = sums.get(found[label], 0.0) + value
        return sums

    def labels(self, name: str) -> list[Labels]:
        """The labels of each sample."""
        return [labels for labels, _ in self._samples.get(name, [])]

    @property
    def latencies(self) -> dict[float, float]:
        """Number of RPCs with items by upper bound of seconds, cumulative and ascending."""
        sums = Counter[float]()
        for method in _METHODS:
            counts = self.by("vitwire_request_seconds_bucket", "le", method=method)
            sums.update({float(bound): count for bound, count in counts.items()})
        return dict(sorted(sums.items()))


@dataclass(frozen=True, slots=True)
class Point:
    """A few seconds of history."""

    time: float
    queued: float
    """Items waiting at the end."""
    requests: float
    """Completed RPCs with items per second."""
    median: float | None
    """Median seconds of these RPCs; None without any."""
    p95: float | None
    """95th percentile of their seconds."""


def quantile(counts: Mapping[float, float], share: float) -> float | None:
    """The quantile `share` from cumulative counts by ascending bound; None without counts.

    Interpolates linearly within a bucket; beyond the last finite bound, returns that bound.
    """
    total = max(counts.values(), default=0.0)
    if not total:
        return None
    rank = share * total
    lower, below = 0.0, 0.0
    for bound, count in counts.items():
        if count >= rank:
            return lower if bound == float("inf") else lower + (bound - lower) * (rank - below) / (count - below)
        lower, below = bound, count
    return lower


def point(before: Readings, after: Readings) -> Point:
    """The history between two snapshots."""
    earlier = before.latencies
    counts = {bound: count - earlier.get(bound, 0.0) for bound, count in after.latencies.items()}
    ended = max(counts.values(), default=0.0)
    return Point(
        time=after.time,
        queued=after.total("vitwire_queue_items"),
        requests=ended / max(after.time - before.time, 1e-3),
        median=quantile(counts, 0.5),
        p95=quantile(counts, 0.95),
    )


class History:
    """Five minutes of snapshots, one every two seconds."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self.points: deque[Point] = deque(maxlen=round(KEPT_SECONDS / EVERY_SECONDS))
        """Oldest first."""

    async def take(self) -> None:
        """Take snapshots until cancelled."""
        before = Readings(self._registry)
        while True:
            await asyncio.sleep(EVERY_SECONDS)
            after = Readings(self._registry)
            self.points.append(point(before, after))
            before = after
