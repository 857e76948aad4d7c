"""Metrics of prometheus_client in OpenTelemetry's form, under the names that /metrics shows."""

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    NumberDataPoint,
    Sum,
)
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.samples import Sample

Labels = tuple[tuple[str, str], ...]

_UNITS = {"_seconds": "s", "_bytes": "By"}
_CREATED = "_created"
"""Samples of prometheus_client with the time that a series was made, which are no series."""


class Translator:
    """Translates all families of a registry, again and again. Counts are cumulative.

    A counter that went down belongs to a process that was started again, so its start moves on.
    """

    def __init__(self) -> None:
        self._start = self._read = time.time_ns()
        self._counts: dict[tuple[str, Labels], tuple[int, float]] = {}
        """Start and last value of each counter."""

    def metrics(self, families: Iterable[Family]) -> list[Metric]:
        """The metrics of all families that have samples."""
        now = time.time_ns()
        found = [metric for family in families for metric in self._translated(family, now)]
        self._read = now
        return found

    def _translated(self, family: Family, now: int) -> Iterator[Metric]:
        if family.type == "histogram":
            points = [_histogram(labels, samples, self._start, now) for labels, samples in _groups(family.samples)]
            if points:
                data = Histogram(points, AggregationTemporality.CUMULATIVE)
                yield Metric(family.name, family.documentation, _unit(family.name), data)
            return
        series: dict[str, list[Sample]] = {}
        for sample in family.samples:
            if not sample.name.endswith(_CREATED):
                series.setdefault(sample.name, []).append(sample)
        for name, samples in series.items():
            yield Metric(name, family.documentation, _unit(name), self._numbers(family.type, samples, now))

    def _numbers(self, kind: str, samples: Iterable[Sample], now: int) -> Sum | Gauge:
        if kind != "counter":
            return Gauge([NumberDataPoint(each.labels, 0, now, each.value) for each in samples])
        points = [NumberDataPoint(each.labels, self._started(each), now, each.value) for each in samples]
        return Sum(points, AggregationTemporality.CUMULATIVE, is_monotonic=True)

    def _started(self, sample: Sample) -> int:
        key = sample.name, tuple(sorted(sample.labels.items()))
        start, last = self._counts.get(key, (self._start, 0.0))
        if sample.value < last:
            start = self._read
        self._counts[key] = start, sample.value
        return start


def _unit(name: str) -> str:
    """In UCUM; empty if the name has none."""
    name = name.removesuffix("_total")
    return next((unit for suffix, unit in _UNITS.items() if name.endswith(suffix)), "")


def _groups(samples: Iterable[Sample]) -> Iterable[tuple[Labels, list[Sample]]]:
    """The samples of each histogram of a family, by labels without the bound."""
    groups: dict[Labels, list[Sample]] = {}
    for sample in samples:
        if not sample.name.endswith(_CREATED):
            labels = tuple(sorted(each for each in sample.labels.items() if each[0] != "le"))
            groups.setdefault(labels, []).append(sample)
    return groups.items()


def _histogram(labels: Labels, samples: Sequence[Sample], start: int, now: int) -> HistogramDataPoint:
    """One histogram, whose buckets count what is in them alone; on a page each counts those below it too."""
    up_to = sorted((float(each.labels["le"]), int(each.value)) for each in samples if "le" in each.labels)
    below = [0, *(count for _, count in up_to)]
    return HistogramDataPoint(
        attributes=dict(labels),
        start_time_unix_nano=start,
        time_unix_nano=now,
        count=below[-1],
        sum=sum(each.value for each in samples if each.name.endswith("_sum")),
        bucket_counts=[upper - lower for lower, upper in pairwise(below)],
        explicit_bounds=[bound for bound, _ in up_to if bound < math.inf],
        min=None,  # type: ignore[arg-type]  # not known, and optional in OTLP
        max=None,  # type: ignore[arg-type]
    )
