"""One RPC in flight: what it holds, and where its outcomes arrive."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from vitwire_server.core.errors import Overloaded
from vitwire_server.core.items import Item
from vitwire_server.core.reports import Outcome
from vitwire_server.scheduling.admission import Admission, Permit
from vitwire_server.scheduling.scheduler import Scheduler
from vitwire_server.scheduling.tickets import Entry, Priority, Ticket
from vitwire_server.scheduling.traces import TraceWriter


class Call:
    """Submits an RPC's items and collects their outcomes; used on the event loop only.

    An item is open from `open` until its outcome was sent and `release` was called. Owns the ticket
    and the permits; `close` gives both back whatever happened before.
    """

    def __init__(
        self, scheduler: Scheduler, admission: Admission, remaining: float | None, trace: TraceWriter | None = None
    ) -> None:
        """`remaining` seconds are left until the caller's deadline; None for no deadline."""
        self._trace = trace
        self._scheduler = scheduler
        self._admission = admission
        self._loop = asyncio.get_running_loop()
        self._open: set[int] = set()
        self._submitted: set[int] = set()
        self._permits: dict[int, Permit] = {}
        self._released = asyncio.Event()
        self._finished = False
        self._outcomes: asyncio.Queue[tuple[int, Outcome] | Exception | None] = asyncio.Queue()
        deadline = None if remaining is None else scheduler.now() + remaining
        self._ticket = Ticket(self._deliver, deadline)

    def set_priority(self, priority: Priority) -> None:
        """Before the first item is submitted."""
        self._ticket.priority = priority

    def is_open(self, index: int) -> bool:
        """Whether item `index` is not answered yet."""
        return index in self._open

    def open(self, indices: Sequence[int]) -> None:
        """Items that an outcome will be sent for."""
        self._open.update(indices)

    def admit(self, index: int, items: int, nbytes: int) -> None:
        """Take the right to have `items` items in the server until `index` is released. Raises Overloaded."""
        self._permits[index] = self._admission.admit(items, nbytes)

    async def admit_in_turn(self, index: int, nbytes: int) -> None:
        """As `admit` for one item, but waits while this call itself holds what is missing. Raises Overloaded."""
        while True:
            try:
                return self.admit(index, 1, nbytes)
            except Overloaded:
                if not self._submitted:
                    raise
            self._released.clear()
            await self._released.wait()

    def submit(self, items: Sequence[tuple[int, Item]]) -> None:
        """Queue items that were admitted. Raises Unavailable when the server shuts down."""
        self._submitted.update(index for index, _ in items)
        now = self._scheduler.now()
        self._scheduler.submit(Entry(self._ticket, index, item, now) for index, item in items)
        if self._trace:
            self._trace.record(item for _, item in items)

    def settle(self, index: int, outcome: Outcome) -> None:
        """The outcome of an item is known."""
        self._outcomes.put_nowait((index, outcome))

    def fail(self, error: Exception) -> None:
        """End the RPC with an error of the whole."""
        self._outcomes.put_nowait(error)

    def finish(self) -> None:
        """No more items will come."""
        self._outcomes.put_nowait(None)

    async def next(self) -> tuple[int, Outcome] | None:
        """The next outcome; None once `finish` was called and every open item was released.

        Raises what `fail` was given.
        """
        while not self._finished or self._open:
            outcome = await self._outcomes.get()
            if isinstance(outcome, Exception):
                raise outcome
            if outcome is not None:
                return outcome
            self._finished = True
        return None

    def release(self, index: int) -> None:
        """The outcome of an item was sent; a second call does nothing."""
        self._open.discard(index)
        self._submitted.discard(index)
        if permit := self._permits.pop(index, None):
            permit.release()
        self._released.set()

    async def room(self, most: int) -> None:
        """Wait while `most` items or more are in the engine's hands, or wait to be sent.

        Not reading on is what makes a client wait that sends faster than it reads.
        """
        while len(self._submitted) + self._outcomes.qsize() >= most:
            self._released.clear()
            await self._released.wait()

    def close(self) -> None:
        """Cancel what still waits, and give back every permit and every row that was not sent."""
        self._scheduler.cancel(self._ticket)
        self._ticket.deliver = _nobody
        for index in list(self._permits):
            self.release(index)
        while not self._outcomes.empty():
            self._outcomes.get_nowait()

    def _deliver(self, index: int, outcome: Outcome) -> None:
        """Called by the engine's thread."""
        with suppress(RuntimeError):  # the loop is closed: the process is about to exit
            self._loop.call_soon_threadsafe(self.settle, index, outcome)


def _nobody(index: int, outcome: Outcome) -> None:
    """Takes the place of `deliver` once the RPC is over."""
