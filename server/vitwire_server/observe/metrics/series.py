"""Makers of metrics, and the metrics that several concerns record."""

from collections.abc import Iterable, Mapping
from itertools import product
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from vitwire_server.core.items import Modality
from vitwire_server.core.models import Place
from vitwire_server.core.reports import Path

_MILLISECONDS = (0.5, 0.75, 1, 1.5, 2, 3, 4, 5, 6, 8, 10, 15, 20, 30, 50, 75, 100, 150, 250, 500)
SECONDS = (*(each / 1000 for each in _MILLISECONDS), 1.0, 2.5, 5.0, 10.0, 30.0)
"""Buckets of durations."""
M = TypeVar("M", Counter, Gauge, Histogram)


class Series:
    """Makes metrics with the prefix `vitwire_` in a registry, and has those that more than one concern records.

    A label is given with the values to show before anything is recorded, so that rates begin at zero.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self.items = self.counter("items", "Items encoded, by path", modality=Modality, path=Path)
        self.stages = self.histogram(
            "stage_seconds", "Time by stage: queue and send per item, the others per batch", SECONDS, stage=("send",)
        )
        ways = ("stream", "nixl")
        self.delivered = self.counter("delivered_bytes", "Bytes of embeddings delivered to clients", way=ways)
        self.delivery_seconds = self.histogram(
            "delivery_seconds", "Time to deliver an embedding, by way", SECONDS, way=ways
        )
        self.prepare_seconds = self.histogram(
            "prepare_seconds",
            "Time of a picture or file in a decoder, by its place; batch: time of a batch's pictures in the engine",
            SECONDS, where=Place, stage=(),
        )  # fmt: skip
        self.copied = self.counter(
            "copied_bytes", "Bytes of embeddings copied from the device to the host, or back", to=("host", "device")
        )
        self.cancelled = self.counter(
            "cancelled", "Items cancelled, by the stage they were in", stage=("queue", "encoded", "send")
        )

    def counter(self, name: str, text: str, **labels: Iterable[str]) -> Counter:
        """A counter; its name gets the suffix `_total`."""
        return _shown(Counter(f"vitwire_{name}", text, labels, registry=self._registry), labels)

    def gauge(self, name: str, text: str, **labels: Iterable[str]) -> Gauge:
        """A gauge; the values of several processes are added, see `edges.py`."""
        made = Gauge(f"vitwire_{name}", text, labels, registry=self._registry, multiprocess_mode="livesum")
        return _shown(made, labels)

    def least(self, name: str, text: str) -> Gauge:
        """A gauge whose least value counts if several edges record it; the engine's process then leaves it at 0."""
        return Gauge(f"vitwire_{name}", text, registry=self._registry, multiprocess_mode="livemin")

    def histogram(self, name: str, text: str, buckets: Iterable[float], **labels: Iterable[str]) -> Histogram:
        """A histogram with these bucket bounds."""
        made = Histogram(f"vitwire_{name}", text, labels, registry=self._registry, buckets=tuple(buckets))
        return _shown(made, labels)


def _shown(metric: M, labels: Mapping[str, Iterable[str]]) -> M:
    if labels:
        for values in product(*labels.values()):
            metric.labels(*values)
    return metric
