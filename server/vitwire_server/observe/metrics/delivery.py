"""Metrics that `delivery/` records, in the delivery thread."""

from vitwire_server.core.delivery import Fallback
from vitwire_server.observe.metrics.series import Series, Shared


class DeliveryMetrics:
    """Rows written into clients' memory."""

    def __init__(self, series: Series, shared: Shared) -> None:
        self.agents = series.gauge("delivery_agents", "NIXL agents of clients that the server is connected to")
        self._fallbacks = series.counter(
            "delivery_fallbacks", "Items with a region whose rows were sent in the response, by reason", "reason"
        )
        self._delivered, self._seconds, self._copied = shared.delivered, shared.delivery_seconds, shared.copied
        for reason in Fallback:
            self._fallbacks.labels(reason)
        self._delivered.labels("nixl")
        self._seconds.labels("nixl")

    def delivered(self, nbytes: int, seconds: float) -> None:
        """Rows are complete in a client's memory, so long after their delivery was requested."""
        self._delivered.labels("nixl").inc(nbytes)
        self._seconds.labels("nixl").observe(seconds)

    def uploaded(self, nbytes: int) -> None:
        """Rows were copied from the host to the device, to be delivered from there."""
        self._copied.labels("device").inc(nbytes)

    def fell_back(self, reason: Fallback) -> None:
        """Rows have to be sent in the response."""
        self._fallbacks.labels(reason).inc()
