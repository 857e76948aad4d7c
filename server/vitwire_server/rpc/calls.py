"""One RPC in flight: what it holds, and where its outcomes arrive."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from vitwire_server.core.errors import EncoderError
from vitwire_server.core.items import Item
from vitwire_server.core.reports import Outcome
from vitwire_server.scheduling.admission import Admission, Permit
from vitwire_server.scheduling.scheduler import Scheduler
from vitwire_server.scheduling.tickets import Entry, Ticket


class Call:
    """Submits an RPC's items and collects their outcomes on the event loop.

    Owns the ticket and the permits; `close` gives both back whatever happened before.
    """

    def __init__(self, scheduler: Scheduler, admission: Admission, remaining: float | None) -> None:
        """`remaining` seconds are left until the caller's deadline; None for no deadline."""
        self._scheduler = scheduler
        self._admission = admission
        self._loop = asyncio.get_running_loop()
        self._permits: dict[int, Permit] = {}
        self._submitted: set[int] = set()
        self._released = asyncio.Event()
        self._finished = False
        self._outcomes: asyncio.Queue[tuple[int, Outcome] | EncoderError | None] = asyncio.Queue()
        deadline = None if remaining is None else scheduler.now() + remaining
        self._ticket = Ticket(self._deliver, deadline)

    def holds(self, index: int) -> bool:
        """Whether item `index` is in flight."""
        return index in self._permits

    def admit(self, index: int, nbytes: int) -> None:
        """Take the right to have item `index` in the server. Raises Overloaded."""
        self._permits[index] = self._admission.admit(1, nbytes)

    def submit(self, items: Sequence[tuple[int, Item]]) -> None:
        """Queue items that were admitted. Raises Unavailable when the server shuts down."""
        self._submitted.update(index for index, _ in items)
        now = self._scheduler.now()
        self._scheduler.submit(Entry(self._ticket, index, item, now) for index, item in items)

    def settle(self, index: int, outcome: Outcome) -> None:
        """An outcome that is known without the engine; on the event loop only."""
        self._outcomes.put_nowait((index, outcome))

    def fail(self, error: EncoderError) -> None:
        """End the RPC with an error of the whole; on the event loop only."""
        self._outcomes.put_nowait(error)

    def finish(self) -> None:
        """No more items will come; on the event loop only."""
        self._outcomes.put_nowait(None)

    async def next(self) -> tuple[int, Outcome] | None:
        """The next outcome; None once `finish` was called and every item was released.

        Raises what `fail` was given.
        """
        while not self._finished or self._permits or not self._outcomes.empty():
            outcome = await self._outcomes.get()
            if isinstance(outcome, EncoderError):
                raise outcome
            if outcome is not None:
                return outcome
            self._finished = True
        return None

    def release(self, index: int) -> None:
        """The outcome of an item was sent; a second call does nothing."""
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
        """Cancel what still waits and give every permit back."""
        self._scheduler.cancel(self._ticket)
        for index in list(self._permits):
            self.release(index)

    def _deliver(self, index: int, outcome: Outcome) -> None:
        with suppress(RuntimeError):  # the loop is closed: the process is about to exit
            self._loop.call_soon_threadsafe(self.settle, index, outcome)
