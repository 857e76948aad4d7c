"""One RPC in flight: what it holds, and where its outcomes arrive."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from vitwire_server.caching.keys import key_of, name_of
from vitwire_server.caching.single_flight import SingleFlight, Waiter
from vitwire_server.core.errors import InvalidTensors, NotCached, Overloaded
from vitwire_server.core.items import CacheLookup, Item
from vitwire_server.core.reports import Encoded, Outcome
from vitwire_server.fitting.traces import TraceWriter
from vitwire_server.observe.request_ids import REQUEST_ID
from vitwire_server.scheduling.admission import Admission, Permit
from vitwire_server.scheduling.scheduler import Scheduler
from vitwire_server.scheduling.tickets import Entry, Priority, Ticket


@dataclass(frozen=True, slots=True)
class Shared:
    """What all RPCs work with."""

    scheduler: Scheduler
    admission: Admission
    single_flight: SingleFlight
    fingerprint: str
    """Of the tower's weights."""
    trace: TraceWriter | None = None


class Call:
    """Submits an RPC's items and collects their outcomes; used on the event loop only.

    An item is open from `open` until its outcome was sent and `release` was called. Owns the ticket
    and the permits; `close` gives both back whatever happened before.
    """

    def __init__(self, shared: Shared, principal: str, caller: str, remaining: float | None) -> None:
        """`caller` is whose share promised uploads take; `remaining` seconds are left until the caller's deadline."""
        self._shared = shared
        self._principal = principal
        self._caller = caller
        self._loop = asyncio.get_running_loop()
        self._open: set[int] = set()
        self._submitted: set[int] = set()
        self._unsent: set[int] = set()
        self._waiters: dict[int, Waiter] = {}
        self._permits: dict[int, Permit] = {}
        self._released = asyncio.Event()
        self._finished = False
        self._outcomes: asyncio.Queue[tuple[int, Outcome] | Exception | None] = asyncio.Queue()
        deadline = None if remaining is None else shared.scheduler.now() + remaining
        self._ticket = Ticket(self._deliver, deadline, request_id=REQUEST_ID.get())

    @property
    def wants_digests(self) -> bool:
        """Whether `submit` needs to know what items show."""
        return self._shared.single_flight.is_on

    @property
    def is_idle(self) -> bool:
        """Whether no item is open."""
        return not self._open

    def set_priority(self, priority: Priority) -> None:
        """Before the first item is submitted."""
        self._ticket.priority = priority

    def is_open(self, index: int) -> bool:
        """Whether item `index` is not answered yet."""
        return index in self._open

    def open(self, indices: Sequence[int]) -> None:
        """Items that an outcome will be sent for."""
        self._open.update(indices)

    def admit(self, nbytes: Mapping[int, int]) -> None:
        """Take the right to have items of so many bytes in the server, all or none, each until it is released.

        Raises Overloaded.
        """
        permits = self._shared.admission.admit(list(nbytes.values()))
        self._permits |= dict(zip(nbytes, permits, strict=True))

    async def admit_in_turn(self, index: int, nbytes: int, *, promised: bool = False) -> None:
        """As `admit` for one item, but waits while this call itself holds what is missing. Raises Overloaded.

        `promised` bytes are still to come, and count against the caller's share until the item is submitted.
        """
        while True:
            try:
                if promised:
                    self._permits[index] = self._shared.admission.promise(nbytes, self._caller)
                    return
                self.admit({index: nbytes})
                return
            except Overloaded as error:
                if not self._submitted or error.reason == "uploads":
                    raise
            self._released.clear()
            await self._released.wait()

    def check_deadline(self, tokens: int, items: int = 1) -> None:
        """Raises DeadlineExceeded if items of so many tokens cannot be done in time."""
        self._shared.scheduler.check_deadline(self._ticket, tokens, items)

    def find(self, lookup: CacheLookup) -> Encoded | NotCached:
        """The answer to an item without pixels."""
        name = name_of(lookup, self._principal, self._shared.fingerprint)
        assert name is not None, "an item without pixels has a content_id"
        return self._shared.single_flight.find(name, lookup)

    def submit(self, items: Mapping[int, Item], digests: Mapping[int, bytes]) -> None:
        """Queue items that were admitted, unless one of the same content is cached or on its way.

        `digests` has each item's if `wants_digests`. Raises DeadlineExceeded for all of them together, and
        Unavailable when the server shuts down.
        """
        for index in items:
            self._permits[index].arrived()
        waiters = {index: self._waiter(index, item, digests[index]) for index, item in items.items() if digests}
        single_flight = self._shared.single_flight
        due = [
            item.footprint.tokens
            for i, item in items.items()
            if i not in waiters or not single_flight.holds(waiters[i])
        ]
        if due:
            self.check_deadline(sum(due), len(due))
        self._submitted.update(items)
        self._waiters |= waiters
        self._queue({i: item for i, item in items.items() if i not in waiters or single_flight.enter(waiters[i])})
        if self._shared.trace:
            self._shared.trace.record(items.values())

    def settle(self, index: int, outcome: Outcome) -> None:
        """The outcome of an item is known."""
        if isinstance(outcome, InvalidTensors):
            outcome = outcome.of_item(index)
        self._waiters.pop(index, None)
        self._unsent.add(index)
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
        self._unsent.discard(index)
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

    def close(self) -> int:
        """Cancel what still waits, and give back every permit and every row; returns how many items had unsent ones."""
        self._shared.scheduler.cancel(self._ticket)
        self._ticket.deliver = _nobody
        waiters, self._waiters = self._waiters, {}
        self._shared.single_flight.leave(waiters.values())
        unsent = len(self._unsent)
        for index in list(self._permits):
            self.release(index)
        while not self._outcomes.empty():
            self._outcomes.get_nowait()
        return unsent

    def _waiter(self, index: int, item: Item, digest: bytes) -> Waiter:
        shared = self._shared
        return Waiter(
            key_of(item, digest, self._principal, shared.fingerprint),
            name_of(item, self._principal, shared.fingerprint),
            self._ticket,
            run=lambda: self._queue({index: item}),
            settle=partial(self.settle, index),
        )

    def _queue(self, items: Mapping[int, Item]) -> None:
        now = self._shared.scheduler.now()
        self._shared.scheduler.submit(Entry(self._ticket, index, item, now) for index, item in items.items())

    def _deliver(self, index: int, outcome: Outcome) -> None:
        """Called by the engine's thread."""
        with suppress(RuntimeError):  # the loop is closed: the process is about to exit
            self._loop.call_soon_threadsafe(self._completed, index, outcome)

    def _completed(self, index: int, outcome: Outcome) -> None:
        waiter = self._waiters.pop(index, None)
        if waiter:
            self._shared.single_flight.completed(waiter, outcome)
        if not self._ticket.cancelled:
            self.settle(index, outcome)


def _nobody(index: int, outcome: Outcome) -> None:
    """Takes the place of `deliver` once the RPC is over."""
