"""How many requests are in flight, and how many bytes they hold."""

from collections.abc import Iterator
from contextlib import contextmanager

from vitwire.router.errors import ApiError, overloaded
from vitwire.router.metrics import Metrics


class Ticket:
    """One request in flight, and the bytes it holds."""

    def __init__(self, admission: "Admission") -> None:
        self._admission = admission
        self.held = 0

    def hold(self, count: int) -> None:
        """Take memory for bytes. Raises ApiError if the router has none left."""
        self._admission.take(count)
        self.held += count

    def release(self, count: int) -> None:
        """Give memory back."""
        self._admission.take(-count)
        self.held -= count


class Admission:
    """The limits that all requests share; used by the event loop only."""

    def __init__(self, max_requests: int, max_bytes: int, metrics: Metrics) -> None:
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._metrics = metrics
        self._requests = 0
        self._bytes = 0

    @contextmanager
    def request(self) -> Iterator[Ticket]:
        """Admit a request for the time of the block. Raises ApiError if too many are in flight."""
        if self._requests >= self._max_requests:
            raise self._refused("requests", f"{self._max_requests} requests are in flight already")
        self._requests += 1
        self._metrics.inflight.set(self._requests)
        ticket = Ticket(self)
        try:
            yield ticket
        finally:
            ticket.release(ticket.held)
            self._requests -= 1
            self._metrics.inflight.set(self._requests)

    def take(self, count: int) -> None:
        """Count bytes, which may be negative. Raises ApiError if there are too many."""
        if count > 0 and self._bytes + count > self._max_bytes:
            raise self._refused("bytes", "the router holds as many bytes of requests as it may")
        self._bytes += count
        self._metrics.buffered.set(self._bytes)

    def _refused(self, reason: str, message: str) -> ApiError:
        self._metrics.rejected.labels(reason).inc()
        return overloaded(message, "router_overloaded")
