"""From an item's outcome to its caller: its rows in the caller's memory, on the host for the response, or stored."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Lock

import numpy as np

from vitwire_server.caching.cache import Name
from vitwire_server.caching.single_flight import Joining, SingleFlight, Waiter
from vitwire_server.core.delivery import (
    Consumer,
    Delivered,
    DeviceRows,
    Fallback,
    MemoryKind,
    NotDelivered,
    Placing,
    Region,
    Stored,
)
from vitwire_server.core.errors import EncodeFailed, EncoderError, Unavailable
from vitwire_server.core.items import Embedding
from vitwire_server.core.reports import Encoded, Outcome, Path
from vitwire_server.delivery.courier import Courier
from vitwire_server.scheduling.admission import Permit
from vitwire_server.scheduling.tickets import Ticket
from vitwire_server.sessions.session import Opening, Settle


class SharedRows:
    """Rows that others may hold as well, kept until they are not read any more: on the device, or bytes of the host."""

    def __init__(self, rows: DeviceRows | memoryview) -> None:
        self._rows: DeviceRows | np.ndarray[tuple[int], np.dtype[np.uint8]] | None
        if isinstance(rows, memoryview):
            self._rows = array = np.frombuffer(rows, np.uint8)
            self.address, self.nbytes, self.device = array.ctypes.data, len(array), None
        else:
            self._rows = rows
            self.address, self.nbytes, self.device = rows.address, rows.nbytes, rows.device

    def is_ready(self) -> bool:
        return isinstance(self._rows, np.ndarray) or (self._rows is not None and self._rows.is_ready())

    def release(self) -> None:
        self._rows = None


class Mailbox:
    """Runs calls of any thread on the event loop it was created on, in order.

    Calls that are posted together cost one wake-up: each wake-up is a system call, and holds the sender's thread.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._lock = Lock()
        self._calls: list[Callable[[], None]] = []

    def post(self, call: Callable[[], None]) -> None:
        """Have `call` run on the loop. Thread-safe."""
        with self._lock:
            self._calls.append(call)
            if len(self._calls) > 1:
                return
        with suppress(RuntimeError):  # the loop is closed: the process is about to exit
            self._loop.call_soon_threadsafe(self._run)

    def _run(self) -> None:
        with self._lock:
            calls, self._calls = self._calls, []
            for call in calls[1:]:  # before another thread can post the next one
                self._loop.call_soon(call)  # one that fails ends no other
        calls[0]()  # one pass of the loop earlier


@dataclass(slots=True)
class ItemState:
    """State of one item in a session, from its admission until its release."""

    permit: Permit | None = None
    waiter: Waiter | None = None
    """Until the outcome is known; None if nothing is cached."""
    submitted: bool = False
    region: Region | None = None
    store_only: bool = False
    expected: Name | None = None
    """The name of an item with pixels, while others may wait for it."""
    joining: Joining | None = None
    """The wait of an item without pixels for another."""

    def expect(self, single_flight: SingleFlight, name: Name | None) -> None:
        """Let items without pixels wait for this one from now on, if it has a name."""
        if single_flight.is_on and self.expected is None and name:
            self.expected = name
            single_flight.expect(name)

    def settled(self, single_flight: SingleFlight, error: EncoderError | None = None) -> None:
        """The item has its outcome, or none will come."""
        name, self.expected = self.expected, None
        if name:
            single_flight.settled(name, error)

    def give_back(self, single_flight: SingleFlight) -> None:
        """The item is over."""
        if self.joining:
            single_flight.quit(self.joining)
        self.settled(single_flight)
        if self.permit:
            self.permit.release()


@dataclass(slots=True)
class Outcomes:
    """The items that a session holds, and what becomes of their outcomes. Used on the session's event loop.

    Rows that arrive after the ticket was cancelled settle nothing.
    """

    single_flight: SingleFlight
    courier: Courier | None
    mailbox: Mailbox
    opening: Opening
    settle: Settle
    held: dict[int, ItemState] = field(default_factory=dict)
    ticket: Ticket = field(init=False)

    def __post_init__(self) -> None:
        opening = self.opening
        self.ticket = Ticket(self._encoded, opening.deadline, opening.priority, request_id=opening.request_id)

    def raise_if_closed(self) -> None:
        """Raises Unavailable after `close`: nothing taken from then on would be given back."""
        if self.ticket.cancelled:
            raise Unavailable("the RPC has ended")

    def answered(self, key: int, outcome: Outcome) -> None:
        """Called by single flight, which has dropped the waiter."""
        if held := self.held.get(key):
            held.waiter = None
        self.deliver(key, outcome)

    def deliver(self, key: int, outcome: Outcome) -> None:
        """Settle an item, once its rows are in its region if it has one, else on the host if they are returned."""
        held = self.held.get(key)
        if held:
            held.settled(self.single_flight, outcome if isinstance(outcome, EncoderError) else None)
        if held is None or not isinstance(outcome, Encoded):
            self.settle(key, outcome)
        elif held.store_only:
            self.settle(key, _without_rows(replace(outcome, delivery=Stored())))
        else:
            self._hand_out(key, held.region, outcome)

    def close(self) -> None:
        """All items leave single flight before a waiter of another session is promoted."""
        self.ticket.deliver = lambda *_: None
        held, self.held = self.held, {}
        self.single_flight.leave([item.waiter for item in held.values() if item.waiter])
        for item in held.values():
            if item.joining:  # before any item of this session answers what waits for its name
                self.single_flight.quit(item.joining)
        for item in held.values():
            item.give_back(self.single_flight)

    def _encoded(self, key: int, outcome: Outcome) -> None:
        """Called by the engine's thread."""
        self.mailbox.post(lambda: self._completed(key, outcome))

    def _completed(self, key: int, outcome: Outcome) -> None:
        held = self.held.get(key)
        if held and isinstance(outcome, Encoded) and outcome.is_partial:
            self.settle(key, outcome)
            return
        if held and held.waiter:
            waiter, held.waiter = held.waiter, None
            self.single_flight.completed(waiter, outcome)
        if not self.ticket.cancelled:
            self.deliver(key, outcome)

    def _hand_out(self, key: int, region: Region | None, outcome: Encoded) -> None:
        """Deliver the rows to the region, if there is one and that was not tried before, else settle the item."""
        embedding = outcome.embedding
        consumer = self.opening.consumer if region and outcome.delivery is None else None
        if not embedding.is_on_host and (consumer is None or _from_device(embedding, consumer) is None):
            assert embedding.device, "else they are on the host"
            self.single_flight.fetch(embedding.device, partial(self._fetched, key, region, outcome))
        elif region is None or consumer is None:
            returned = replace(outcome, embedding=replace(embedding, device=None)) if embedding.device else outcome
            self.settle(key, returned)
        else:
            self._write(key, Placing(consumer, region), outcome)

    def _fetched(self, key: int, region: Region | None, outcome: Encoded, found: memoryview | EncodeFailed) -> None:
        if self.ticket.cancelled:
            return
        if isinstance(found, EncodeFailed):
            self.settle(key, found)
        else:
            embedding = replace(outcome.embedding, data=found, device=None)
            self._hand_out(key, region, replace(outcome, embedding=embedding))

    def _write(self, key: int, placing: Placing, outcome: Encoded) -> None:
        """Have rows written from the kind of memory that the consumer has: between kinds, NIXL is very slow."""
        embedding = outcome.embedding

        def done(delivery: Delivered | NotDelivered) -> None:
            """Called by any thread, or at once."""
            self.mailbox.post(lambda: self._delivered(key, placing, replace(outcome, delivery=delivery)))

        if self.courier is None:
            done(NotDelivered(Fallback.OFF))
        elif embedding.nbytes > placing.region.nbytes:
            self.courier.refuse(Fallback.TOO_SMALL, done)
        else:
            rows: DeviceRows | memoryview | Fallback | None = _from_device(embedding, placing.consumer)
            if rows is None:
                on_host = placing.consumer.memory is MemoryKind.HOST
                rows = embedding.data if on_host else self.courier.upload(embedding.data)
            if isinstance(rows, Fallback):
                self.courier.refuse(rows, done)
            else:
                self.courier.deliver(placing, SharedRows(rows), done)

    def _delivered(self, key: int, placing: Placing, outcome: Encoded) -> None:
        if self.ticket.cancelled:
            return
        if isinstance(outcome.delivery, Delivered):
            if outcome.report.path is Path.CACHE and _from_device(outcome.embedding, placing.consumer):
                self.single_flight.served_from_device()
            self.settle(key, _without_rows(outcome))
        else:
            self._hand_out(key, placing.region, outcome)


def _from_device(embedding: Embedding, consumer: Consumer) -> DeviceRows | None:
    """The rows at the place that the engine wrote them to, if they can be delivered from there."""
    device = embedding.device
    return device if device and (device.device is None) == (consumer.memory is MemoryKind.HOST) else None


def _without_rows(outcome: Encoded) -> Encoded:
    """For the client, which gets none: their memory may be free before it has read that."""
    return replace(outcome, embedding=replace(outcome.embedding, data=memoryview(b""), device=None))
