"""One RPC in flight: the items it holds, and where their outcomes arrive."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from vitwire_server.caching.keys import Digest, digest_of, key_of, name_of
from vitwire_server.caching.single_flight import SingleFlight, Waiter
from vitwire_server.core.errors import InvalidTensors, NotCached, Overloaded
from vitwire_server.core.items import CacheLookup, DType, Item
from vitwire_server.core.models import ModelCard
from vitwire_server.core.reports import Encoded, Outcome
from vitwire_server.fitting.traces import TraceWriter
from vitwire_server.observe.request_ids import REQUEST_ID
from vitwire_server.rpc.codec import Codec, Header
from vitwire_server.scheduling.admission import Admission, Permit
from vitwire_server.scheduling.intake import Intake
from vitwire_server.scheduling.tickets import Entry, Ticket

_LARGE_BYTES = 4 << 20
"""Digests of more than this are computed in a thread."""


@dataclass(frozen=True, slots=True)
class Serving:
    """What RPCs work with once the model is loaded."""

    card: ModelCard
    codec: Codec
    intake: Intake
    admission: Admission
    single_flight: SingleFlight
    trace: TraceWriter | None = None


@dataclass(slots=True)
class _InFlight:
    """One item, from its arrival until its outcome was sent."""

    permit: Permit | None = None
    waiter: Waiter | None = None
    """Until the outcome is known; None where nothing is cached."""
    submitted: bool = False
    answered: bool = False


class Call:
    """Submits an RPC's items and collects their outcomes. Used on the event loop only.

    Owns the ticket and the permits; `close` gives both back whatever happened before.
    """

    def __init__(self, serving: Serving, principal: str, caller: str, remaining: float | None) -> None:
        """`caller` is charged for uploads that are reserved; `remaining` seconds are left until the deadline."""
        self._serving = serving
        self._principal = principal
        self._caller = caller
        self._loop = asyncio.get_running_loop()
        self._items: dict[int, _InFlight] = {}
        self._released = asyncio.Event()
        self._ended = False
        self._outcomes: asyncio.Queue[tuple[int, Outcome] | Exception | None] = asyncio.Queue()
        deadline = None if remaining is None else serving.intake.now() + remaining
        self.ticket = Ticket(self._deliver, deadline, request_id=REQUEST_ID.get())

    @property
    def is_idle(self) -> bool:
        """Whether no item is in flight."""
        return not self._items

    def is_open(self, index: int) -> bool:
        """Whether item `index` is in flight."""
        return index in self._items

    async def reserve(self, index: int, header: Header, output: DType) -> Digest | None:
        """Admit an item whose bytes are still to come; returns the digest to add them to, if one is needed.

        Waits while this call itself holds what is missing. Raises Overloaded or DeadlineExceeded.
        """
        serving = self._serving
        item = self._items[index] = _InFlight()
        if not serving.single_flight.is_on:  # else it may be cached, which only its bytes show
            serving.intake.check_deadline(self.ticket, header.footprint.tokens)
        nbytes = serving.codec.weight(header, output)
        (item.permit,) = await self._admit(lambda: [serving.admission.promise(nbytes, self._caller)])
        return Digest() if serving.single_flight.is_on else None

    async def submit(self, items: Mapping[int, Item | CacheLookup], digests: Mapping[int, bytes] | None = None) -> None:
        """Answer items from the cache, and queue the others.

        Admits those that were not reserved: all of them or none. Raises Overloaded, DeadlineExceeded for all
        together, and Unavailable when the server shuts down.
        """
        serving = self._serving
        for index in items:
            self._items.setdefault(index, _InFlight())
        work = {index: item for index, item in items.items() if isinstance(item, Item)}
        found = {index: self._find(item) for index, item in items.items() if isinstance(item, CacheLookup)}
        nbytes = {i: serving.codec.weight(item, item.output) for i, item in work.items() if not self._items[i].permit}
        nbytes |= {i: len(answer.embedding.data) for i, answer in found.items() if isinstance(answer, Encoded)}
        if nbytes:
            permits = await self._admit(lambda: serving.admission.admit(list(nbytes.values())))
            for index, permit in zip(nbytes, permits, strict=True):
                self._items[index].permit = permit
        for index, answer in found.items():
            self.settle(index, answer)
        if work:
            needed = digests is None and serving.single_flight.is_on
            self._submit(work, await _digests(work) if needed else digests or {})

    def settle(self, index: int, outcome: Outcome) -> None:
        """The outcome of an item is known."""
        if isinstance(outcome, InvalidTensors):
            outcome = outcome.of_item(index)
        item = self._items.setdefault(index, _InFlight())
        item.waiter, item.answered = None, True
        self._outcomes.put_nowait((index, outcome))

    def end(self, error: Exception | None = None) -> None:
        """No more items will come; an error ends the RPC."""
        self._outcomes.put_nowait(error)

    async def next(self) -> tuple[int, Outcome] | None:
        """The next outcome; None once `end` was called and every item was released. Raises the error given to `end`."""
        while not self._ended or self._items:
            outcome = await self._outcomes.get()
            if isinstance(outcome, Exception):
                raise outcome
            if outcome is not None:
                return outcome
            self._ended = True
        return None

    def release(self, index: int) -> None:
        """The outcome of an item was sent; a second call does nothing."""
        item = self._items.pop(index, None)
        if item and item.permit:
            item.permit.release()
        self._released.set()

    async def room(self, most: int) -> None:
        """Wait while `most` items or more are in the engine's hands, or wait to be sent.

        A client that sends faster than it reads waits, as its next message is not read.
        """
        while sum(item.submitted or item.answered for item in self._items.values()) >= most:
            await self._next_release()

    def close(self) -> int:
        """Cancel what still waits, and give back every permit; returns how many items have outcomes that were not sent.

        All items leave single flight before a waiter of another call is promoted.
        """
        self._serving.intake.cancel(self.ticket)
        self.ticket.deliver = _discard
        items, self._items = self._items, {}
        self._serving.single_flight.leave([item.waiter for item in items.values() if item.waiter])
        for item in items.values():
            if item.permit:
                item.permit.release()
        while not self._outcomes.empty():
            self._outcomes.get_nowait()
        return sum(item.answered for item in items.values())

    async def _admit(self, admit: Callable[[], Sequence[Permit]]) -> Sequence[Permit]:
        """What `admit` returns, once this call does not hold what is missing itself. Raises Overloaded."""
        while True:
            try:
                return admit()
            except Overloaded as error:
                if error.reason == "uploads" or not any(item.submitted for item in self._items.values()):
                    raise
            await self._next_release()

    async def _next_release(self) -> None:
        self._released.clear()
        await self._released.wait()

    def _find(self, lookup: CacheLookup) -> Encoded | NotCached:
        name = name_of(lookup, self._principal, self._serving.card.fingerprint)
        assert name is not None, "an item without pixels has a content_id"
        return self._serving.single_flight.find(name, lookup)

    def _submit(self, items: Mapping[int, Item], digests: Mapping[int, bytes]) -> None:
        """Queue admitted items, unless one of the same content is cached or in flight. Raises DeadlineExceeded."""
        serving, single_flight = self._serving, self._serving.single_flight
        for index in items:
            if permit := self._items[index].permit:
                permit.arrived()
        waiters = {index: self._waiter(index, items[index], digest) for index, digest in digests.items()}
        due = [i.footprint.tokens for n, i in items.items() if n not in waiters or not single_flight.holds(waiters[n])]
        if due:
            serving.intake.check_deadline(self.ticket, sum(due), len(due))
        for index in items:
            self._items[index].submitted, self._items[index].waiter = True, waiters.get(index)
        self._queue({i: item for i, item in items.items() if i not in waiters or single_flight.enter(waiters[i])})
        if serving.trace:
            serving.trace.record(items.values())

    def _waiter(self, index: int, item: Item, digest: bytes) -> Waiter:
        fingerprint = self._serving.card.fingerprint
        return Waiter(
            key_of(item, digest, self._principal, fingerprint),
            name_of(item, self._principal, fingerprint),
            self.ticket,
            run=lambda: self._queue({index: item}),
            settle=partial(self.settle, index),
        )

    def _queue(self, items: Mapping[int, Item]) -> None:
        intake = self._serving.intake
        now = intake.now()
        intake.submit(Entry(self.ticket, index, item, now) for index, item in items.items())

    def _deliver(self, index: int, outcome: Outcome) -> None:
        """Called by the engine's thread."""
        with suppress(RuntimeError):  # the loop is closed: the process is about to exit
            self._loop.call_soon_threadsafe(self._completed, index, outcome)

    def _completed(self, index: int, outcome: Outcome) -> None:
        item = self._items.get(index)
        if item and item.waiter:
            waiter, item.waiter = item.waiter, None
            self._serving.single_flight.completed(waiter, outcome)
        if not self.ticket.cancelled:
            self.settle(index, outcome)


async def _digests(items: Mapping[int, Item]) -> dict[int, bytes]:
    """The digest of each item's bytes."""

    def digests() -> dict[int, bytes]:
        return {index: digest_of(item) for index, item in items.items()}

    if sum(item.nbytes for item in items.values()) <= _LARGE_BYTES:
        return digests()
    return await asyncio.to_thread(digests)


def _discard(index: int, outcome: Outcome) -> None:
    """Replaces `deliver` once the RPC is over."""
