"""Metrics of admission and the cache, recorded on the event loop, and of delivery, recorded in its thread."""

from vitwire_server.core.delivery import Fallback
from vitwire_server.core.items import Modality
from vitwire_server.core.reports import Path
from vitwire_server.observe.metrics.series import Series


class AdmissionMetrics:
    """Items and bytes that hold a permit, and the limits on them."""

    def __init__(self, series: Series) -> None:
        self._limit_items = series.gauge("queue_limit_items", "Maximum items admitted at a time")
        self._limit_bytes = series.gauge("queue_limit_bytes", "Maximum bytes admitted at a time")
        self._admitted = 0, 0
        # Functions, as `changed` is called far more often than a page is read.
        series.gauge("admitted_items", "Items admitted and not yet answered").set_function(lambda: self._admitted[0])
        series.gauge("admitted_bytes", "Bytes admitted and not yet answered").set_function(lambda: self._admitted[1])
        self.session_opened = series.counter("tickets_opened", "RPCs that opened a ticket").inc
        self.session_closed = series.counter("tickets_closed", "RPCs that closed their ticket").inc

    def limits(self, items: int, nbytes: int) -> None:
        self._limit_items.set(items)
        self._limit_bytes.set(nbytes)

    def changed(self, items: int, nbytes: int) -> None:
        """What is admitted now."""
        self._admitted = items, nbytes


class CacheMetrics:
    """Hits, misses and size of the embedding cache."""

    def __init__(self, series: Series) -> None:
        self._hits = series.counter("cache_hits", "Items answered from the cache or by another item's forward")
        self.cache_missed = series.counter("cache_misses", "Items looked up in the cache and not found").inc
        self._evictions = series.counter("cache_evictions", "Embeddings evicted from the cache")
        self._bytes = series.gauge("cache_bytes", "Bytes of cached embeddings on the host")
        self._stored = series.gauge("store_bytes", "Bytes of cached embeddings on the device")
        self.served_from_device = series.counter(
            "store_hits", "Cached embeddings that NIXL delivered from the device"
        ).inc
        self.downloaded = series.copied.labels("host").inc
        """Bytes of rows were copied from the device to the host, after their batch."""
        self._items = series.items

    def cache_hit(self, modality: Modality) -> None:
        """An item was answered from the cache."""
        self._hits.inc()
        self._items.labels(modality, Path.CACHE).inc()

    def changed(self, nbytes: int, stored: int, evicted: int) -> None:
        """The cache now holds `nbytes` on the host and `stored` on the device, after evicting `evicted` embeddings."""
        self._bytes.set(nbytes)
        self._stored.set(stored)
        self._evictions.inc(evicted)


class DeliveryMetrics:
    """Rows written into clients' memory."""

    def __init__(self, series: Series) -> None:
        self.agents = series.gauge("delivery_agents", "NIXL agents of clients that the server is connected to")
        self._fallbacks = series.counter(
            "delivery_fallbacks",
            "Items with a region whose embeddings were sent in the response, by reason",
            reason=Fallback,
        )
        self._delivered, self._seconds = series.delivered.labels("nixl"), series.delivery_seconds.labels("nixl")
        self.uploaded = series.copied.labels("device").inc
        """Bytes of rows were copied from the host to the device, to be delivered from there."""

    def delivered(self, nbytes: int, seconds: float) -> None:
        """Rows are complete in a client's memory, this long after their delivery was requested."""
        self._delivered.inc(nbytes)
        self._seconds.observe(seconds)

    def fell_back(self, reason: Fallback) -> None:
        """Rows have to be sent in the response."""
        self._fallbacks.labels(reason).inc()
