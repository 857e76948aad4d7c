"""How metrics are made, and those that several concerns record."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from vitwire_server.core.items import Modality
from vitwire_server.core.reports import Path

_MILLISECONDS = (0.5, 0.75, 1, 1.5, 2, 3, 4, 5, 6, 8, 10, 15, 20, 30, 50, 75, 100, 150, 250, 500)
SECONDS = (*(each / 1000 for each in _MILLISECONDS), 1.0, 2.5, 5.0, 10.0, 30.0)
"""Buckets of durations."""


class Series:
    """Makes metrics with the prefix `vitwire_` in a registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        """A counter; its name gets the suffix `_total`."""
        return Counter(f"vitwire_{name}", text, labels, registry=self._registry)

    def gauge(self, name: str, text: str, *labels: str) -> Gauge:
        """A gauge; those of several processes are added, see `edges.py`."""
        return Gauge(f"vitwire_{name}", text, labels, registry=self._registry, multiprocess_mode="livesum")

    def least(self, name: str, text: str) -> Gauge:
        """A gauge whose least value counts where several edges record it; the engine's process then leaves it at 0."""
        return Gauge(f"vitwire_{name}", text, registry=self._registry, multiprocess_mode="livemin")

    def histogram(self, name: str, text: str, buckets: Iterable[float], *labels: str) -> Histogram:
        """A histogram with these bucket bounds."""
        return Histogram(f"vitwire_{name}", text, labels, registry=self._registry, buckets=tuple(buckets))


class Shared:
    """Metrics that more than one concern records."""

    def __init__(self, series: Series) -> None:
        self.items = series.counter("items", "Items encoded, by path", "modality", "path")
        self.stages = series.histogram(
            "stage_seconds", "Time by stage: queue and send per item, the others per batch", SECONDS, "stage"
        )
        self.delivered = series.counter("delivered_bytes", "Bytes of rows delivered to clients", "way")
        self.delivery_seconds = series.histogram(
            "delivery_seconds", "Time to deliver the rows of an item, by way", SECONDS, "way"
        )
        self.prepare_seconds = series.histogram(
            "prepare_seconds",
            "Time of a picture or file in a decoder, by where that is; batch: of a batch's pictures in the engine",
            SECONDS, "where", "stage",
        )  # fmt: skip
        self.copied = series.counter("copied_bytes", "Bytes of rows copied from the device to the host, or back", "to")
        self.cancelled = series.counter("cancelled", "Items cancelled, by the stage they were in", "stage")
        for place in ("host", "device"):
            self.copied.labels(place)
        for modality in Modality:
            for path in Path:
                self.items.labels(modality, path)
