"""Metrics that `caching/` records, on the event loop."""

from vitwire_server.core.items import Modality
from vitwire_server.core.reports import Path
from vitwire_server.observe.metrics.series import Series, Shared


class CacheMetrics:
    """Hits, misses and size of the embedding cache."""

    def __init__(self, series: Series, shared: Shared) -> None:
        self._hits = series.counter("cache_hits", "Items answered from the cache or by another item's forward")
        self._misses = series.counter("cache_misses", "Items looked up in the cache and not found")
        self._evictions = series.counter("cache_evictions", "Embeddings evicted from the cache")
        self._bytes = series.gauge("cache_bytes", "Bytes of cached embeddings on the host")
        self._stored = series.gauge("store_bytes", "Bytes of cached embeddings on the device")
        self._from_device = series.counter("store_hits", "Cached embeddings that NIXL delivered from the device")
        self._items, self._copied = shared.items, shared.copied

    def cache_hit(self, modality: Modality) -> None:
        """An item was answered from the cache."""
        self._hits.inc()
        self._items.labels(modality, Path.CACHE).inc()

    def cache_missed(self) -> None:
        """An item was looked up and not found."""
        self._misses.inc()

    def served_from_device(self) -> None:
        """A cached embedding was delivered from the device."""
        self._from_device.inc()

    def downloaded(self, nbytes: int) -> None:
        """Rows were copied from the device to the host, after their batch."""
        self._copied.labels("host").inc(nbytes)

    def changed(self, nbytes: int, stored: int, evicted: int) -> None:
        """The cache now holds `nbytes` on the host and `stored` on the device, after evicting `evicted` embeddings."""
        self._bytes.set(nbytes)
        self._stored.set(stored)
        self._evictions.inc(evicted)
