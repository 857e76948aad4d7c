"""How many requests are in flight, and how many bytes they hold."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from vitwire_gateway.openai.errors import ApiError, overloaded
from vitwire_gateway.openai.metrics import Metrics
from vitwire_gateway.openai.shares import Budget, Caller, Full, Holding


class Ticket:
    """One request, and the bytes it holds."""

    def __init__(self, admission: "Admission", caller: Caller, place: Holding, holding: Holding) -> None:
        self.caller = caller
        self.bytes = holding
        self._admission = admission
        self._place = place

    def enter(self) -> None:
        """Count the request as one in flight, once its body has arrived. Raises ApiError if there are too many."""
        self._admission.enter(self._place)

    def hold(self, count: int) -> None:
        """Take memory for bytes. Raises ApiError if the router has none left."""
        self._admission.hold(self.bytes, count)


class Admission:
    """The limits that all requests share; used by the event loop only."""

    def __init__(self, max_requests: int, max_bytes: int, metrics: Metrics) -> None:
        self._requests = Budget(max_requests)
        self._bytes = Budget(max_bytes)
        self._metrics = metrics

    @asynccontextmanager
    async def request(self, caller: Caller) -> AsyncGenerator[Ticket, None]:
        """A request for the time of the block; it holds nothing until its body arrives.

        Raises ApiError at once if there are too many in flight.
        """
        if self._requests.is_full(caller.name):
            raise self._too_many()
        try:
            async with self._requests.holding(caller.name) as place, self._bytes.holding(caller.name) as holding:
                yield Ticket(self, caller, place, holding)
        finally:
            self._show()

    def enter(self, place: Holding) -> None:
        """Let a request in. Raises ApiError."""
        try:
            place.take(1)
        except Full:
            raise self._too_many() from None
        self._show()

    def hold(self, holding: Holding, count: int) -> None:
        """Count bytes. Raises ApiError if there are too many."""
        try:
            holding.take(count)
        except Full:
            raise self._refused("bytes", "the router holds as many bytes of requests as it may") from None
        self._show()

    def drain(self) -> None:
        """End the bodies that arrive too slowly."""
        self._bytes.drain()

    def _show(self) -> None:
        self._metrics.inflight.set(self._requests.used)
        self._metrics.buffered.set(self._bytes.used)

    def _too_many(self) -> ApiError:
        return self._refused("requests", "as many requests are in flight already as may be, or as one caller may have")

    def _refused(self, reason: str, message: str) -> ApiError:
        self._metrics.rejected.labels(reason).inc()
        return overloaded(message, "router_overloaded")
