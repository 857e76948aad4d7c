"""Metrics of admission: what is admitted and what may be. Recorded on the event loop."""

from vitwire_server.observe.metrics.series import Series


class AdmissionMetrics:
    """Items and bytes that hold a permit, and the limits on them."""

    def __init__(self, series: Series) -> None:
        self._limit_items = series.gauge("queue_limit_items", "Maximum items admitted at a time")
        self._limit_bytes = series.gauge("queue_limit_bytes", "Maximum bytes admitted at a time")
        self._items = series.gauge("admitted_items", "Items admitted and not yet answered")
        self._bytes = series.gauge("admitted_bytes", "Bytes admitted and not yet answered")
        self._opened = series.counter("tickets_opened", "RPCs that opened a ticket")
        self._closed = series.counter("tickets_closed", "RPCs that closed their ticket")

    def limits(self, items: int, nbytes: int) -> None:
        """Set the limits."""
        self._limit_items.set(items)
        self._limit_bytes.set(nbytes)

    def session_opened(self) -> None:
        """An RPC opened a ticket."""
        self._opened.inc()

    def session_closed(self) -> None:
        """An RPC closed its ticket."""
        self._closed.inc()

    def changed(self, items: int, nbytes: int) -> None:
        """Set what is admitted now."""
        self._items.set(items)
        self._bytes.set(nbytes)
