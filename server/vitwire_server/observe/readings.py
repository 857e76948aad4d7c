"""What the metrics say at one moment, and how that changed over the last minutes."""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Event, Thread

from prometheus_client import CollectorRegistry

EVERY_SECONDS = 2.0
KEPT_SECONDS = 300.0
_METHODS = ("Encode", "EncodeStream")
"""RPCs that carry items: what latency is told of."""
Labels = Mapping[str, str]


class Readings:
    """The samples of a registry, read at once."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.time = time.time()
        self._samples: dict[str, list[tuple[Labels, float]]] = {}
        for family in registry.collect():
            for sample in family.samples:
                self._samples.setdefault(sample.name, []).append((sample.labels, sample.value))

    def total(self, name: str, **labels: str) -> float:
        """The sum of the samples that have these labels; 0 without any."""
        return sum(value for own, value in self._samples.get(name, []) if labels.items() <= own.items())

    def by(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """Sums by the value of a label, in the order of their first appearance."""
        sums: dict[str, float] = {}
        for own, value in self._samples.get(name, []):
            if labels.items() <= own.items():
                sums[own[label]] = sums.get(own[label], 0.0) + value
        return sums

    def info(self, name: str) -> Labels:
        """The labels of a metric that has one sample; empty before it has."""
        found = self._samples.get(name)
        return found[0][0] if found else {}

    @property
    def latencies(self) -> dict[float, float]:
        """RPCs with items that took at most so many seconds, by the histogram's bounds, ascending."""
        sums: dict[float, float] = {}
        for method in _METHODS:
            for bound, count in self.by("vitwire_request_seconds_bucket", "le", method=method).items():
                sums[float(bound)] = sums.get(float(bound), 0.0) + count
        return dict(sorted(sums.items()))


@dataclass(frozen=True, slots=True)
class Point:
    """A few seconds of the past."""

    time: float
    queued: float
    """Items that waited at its end."""
    requests: float
    """RPCs with items that ended, per second."""
    median: float | None
    """Seconds that half of them took at most; None without any."""
    slow: float | None
    """Seconds that 95 of 100 of them took at most."""


def quantile(counts: Mapping[float, float], share: float) -> float | None:
    """The bound that `share` stays below, by cumulative counts up to ascending bounds; None without any count.

    Within a bucket values are taken to be evenly spread; beyond the last finite bound they are that bound.
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
    """What happened between two readings."""
    earlier = before.latencies
    counts = {bound: count - earlier.get(bound, 0.0) for bound, count in after.latencies.items()}
    ended = max(counts.values(), default=0.0)
    return Point(
        time=after.time,
        queued=after.total("vitwire_queue_items"),
        requests=ended / max(after.time - before.time, 1e-3),
        median=quantile(counts, 0.5),
        slow=quantile(counts, 0.95),
    )


class History:
    """Reads a registry every two seconds, in a daemon thread, and keeps five minutes of it."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._points: deque[Point] = deque(maxlen=round(KEPT_SECONDS / EVERY_SECONDS))
        self._stopping = Event()
        self._thread = Thread(target=self._run, name="history", daemon=True)

    @property
    def points(self) -> Sequence[Point]:
        """The past, oldest first."""
        return list(self._points)

    def start(self) -> None:
        """Read from now on."""
        self._thread.start()

    def stop(self) -> None:
        """Read no more."""
        self._stopping.set()

    def _run(self) -> None:
        before = Readings(self._registry)
        while not self._stopping.wait(EVERY_SECONDS):
            after = Readings(self._registry)
            self._points.append(point(before, after))
            before = after
