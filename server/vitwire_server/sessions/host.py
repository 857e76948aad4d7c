"""The engine's end of a link: sessions of the RPCs of another process."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from weakref import WeakValueDictionary

import numpy as np

from vitwire_server.core.delivery import Delivered, Region, Stored
from vitwire_server.core.errors import EncoderError, Overloaded, Unavailable
from vitwire_server.core.items import CacheLookup, Item
from vitwire_server.core.reports import Encoded, Outcome
from vitwire_server.scheduling.tickets import Priority
from vitwire_server.sessions.arena import ArenaMemory
from vitwire_server.sessions.forms import ItemForm, LookupForm, consumer_of, item_of, lookup_of
from vitwire_server.sessions.link import Link
from vitwire_server.sessions.local import LocalSession, LocalSessions
from vitwire_server.sessions.messages import (
    Admit,
    Ask,
    Close,
    Fault,
    Find,
    Open,
    Placed,
    Queue,
    Release,
    Reply,
    Reserve,
    Rows,
    Spare,
    Submit,
    ToEngine,
    ToRpc,
    pickled,
)
from vitwire_server.sessions.session import Opening

_SPARES, _SPARE_BYTES = 4, 1 << 20
"""Spare blocks of a process, and the size of each."""
SessionMessage = Open | Reserve | Admit | Find | Queue | Submit | Ask | Release | Close


@dataclass(slots=True, weakref_slot=True, eq=False)
class _Copy:
    """Rows of the cache, and their copy in the arena."""

    source: memoryview
    data: memoryview


@dataclass(slots=True)
class _Open:
    """A session, and the memory that the other process may use: it is free again when nothing here refers to it."""

    session: LocalSession
    unfilled: dict[int, Item] = field(default_factory=dict)
    """Items whose bytes are being written."""
    rows: dict[int, memoryview | _Copy] = field(default_factory=dict)
    """Rows that are being read."""
    waiting: list[Callable[[], None]] = field(default_factory=list)
    """Requests that wait until the session releases what it holds. They refer to this object."""

    def release(self, key: int) -> None:
        """The item is over; what waited for that is tried again."""
        self.unfilled.pop(key, None)
        self.rows.pop(key, None)
        self.session.release(key)
        waiting, self.waiting = self.waiting, []
        for attempt in waiting:
            attempt()

    def close(self) -> None:
        """Close the session. No reference cycle is left, which would keep the memory until a garbage collection."""
        self.waiting.clear()
        self.session.close()


class SessionHost:
    """Runs the sessions of one process of RPCs. `close` ends all of them, which gives back what they hold."""

    def __init__(self, engine: LocalSessions, memory: ArenaMemory, link: Link[ToEngine, ToRpc]) -> None:
        self._engine = engine
        self._memory = memory
        self._link = link
        self._sessions: dict[int, _Open] = {}
        self._spares: dict[int, memoryview] = {}
        """Blocks that the process may write into, by their offset."""
        self._copies: WeakValueDictionary[int, _Copy] = WeakValueDictionary()
        """Copies that are being read, by the identity of their source."""

    def receive(self, message: SessionMessage) -> None:
        """Handle a message of the process."""
        match message:
            case Open():
                opening = Opening(
                    message.principal,
                    message.caller,
                    message.deadline,
                    Priority(message.priority),
                    message.request_id,
                    consumer_of(message.consumer, message.principal) if message.consumer else None,
                )
                number = message.session
                session = self._engine.open(
                    opening, settle=lambda key, outcome: self._settle(number, key, outcome), fail=_cannot_fail
                )
                self._sessions[number] = _Open(session)
                self._grant()
            case Reserve():
                opened, item = self._sessions[message.session], item_of(message.item)
                self._reply(opened, message.number, lambda: self._reserve(opened, message.key, item))
            case Admit():
                opened, items = self._sessions[message.session], dict(map(_received, message.items.items()))
                self._reply(opened, message.number, lambda: self._admit(opened, items))
            case Find():
                opened, item = self._sessions[message.session], item_of(message.item)
                self._reply(opened, message.number, lambda: _find(opened, message.key, item, message.digest))
            case Queue():
                opened = self._sessions[message.session]
                self._reply(opened, message.number, lambda: self._queue(opened, message))
            case Submit():
                opened = self._sessions[message.session]
                submitted = {
                    key: _in_block(item_of(form), self._spares.pop(offset))
                    for (key, form), offset in zip(message.items.items(), message.blocks, strict=True)
                }
                self._reply(opened, message.number, lambda: _submit(opened, submitted, message.digests))
                self._grant()
            case Ask():
                opened, tokens = self._sessions[message.session], message.tokens
                self._reply(opened, message.number, lambda: [int(1e6 * opened.session.predicted(tokens))])
            case Release():
                self._sessions[message.session].release(message.key)
            case Close():
                self._sessions.pop(message.session).close()

    def close(self) -> None:
        """The process is gone: end its sessions."""
        sessions, self._sessions = self._sessions, {}
        self._spares.clear()
        for opened in sessions.values():
            opened.close()

    def _reply(self, opened: _Open, number: int, attempt: Callable[[], list[int] | None]) -> None:
        """Reply with what `attempt` returns; while that is None, try again after each release of the session."""
        try:
            offsets = attempt()
        except EncoderError as error:
            self._link.send(Reply(number, [], pickled(error)))
            return
        if offsets is None:
            opened.waiting.append(lambda: self._reply(opened, number, attempt))
        else:
            self._link.send(Reply(number, offsets))

    def _reserve(self, opened: _Open, key: int, item: Item) -> list[int] | None:
        memory = opened.session.try_reserve(key, item)
        return None if memory is None else [self._unfilled(opened, key, item, memory)]

    def _admit(self, opened: _Open, items: Mapping[int, Item | CacheLookup]) -> list[int] | None:
        if not opened.session.try_admit(items):
            return None
        work = {key: item for key, item in items.items() if isinstance(item, Item)}
        memory = {key: self._memory.allocate(item.nbytes) for key, item in work.items()}
        return [self._unfilled(opened, key, item, memory[key]) for key, item in work.items()]

    def _unfilled(self, opened: _Open, key: int, item: Item, memory: memoryview) -> int:
        """Keep an item until its bytes are written; returns the offset to write them to."""
        offset = self._memory.arena.offset_of(memory)
        assert offset is not None, "pixels are received in the arena"
        opened.unfilled[key] = item.filled(memory)
        return offset

    def _queue(self, opened: _Open, message: Queue) -> list[int]:
        items = {key: opened.unfilled.pop(key) for key in message.items}
        for key, (offset, nbytes, on_device) in message.regions.items():
            items[key] = replace(items[key], region=Region(offset, nbytes), on_device=on_device)
        opened.session.queue(items, message.digests)
        return []

    def _grant(self) -> None:
        """Keep the process supplied with spare blocks while there is memory: they save small requests a round trip."""
        with suppress(Overloaded):
            while len(self._spares) < _SPARES and self._memory.free > self._memory.arena.size // 2:
                block = self._memory.allocate(_SPARE_BYTES)
                offset = self._memory.arena.offset_of(block)
                assert offset is not None
                self._spares[offset] = block
                self._link.send(Spare(offset, _SPARE_BYTES))

    def _settle(self, number: int, key: int, outcome: Outcome) -> None:
        if isinstance(outcome, Encoded):
            try:
                self._link.send(self._rows(number, key, outcome))
                return
            except EncoderError as error:
                outcome = error
        self._link.send(Fault(number, key, pickled(outcome)))

    def _rows(self, number: int, key: int, outcome: Encoded) -> Rows | Placed:
        """Where the rows lie. Cached ones lie elsewhere: all that read them share one copy. Raises Overloaded."""
        embedding, delivery = outcome.embedding, outcome.delivery
        if isinstance(delivery, Delivered | Stored):
            region, seconds = None, 0.0
            if isinstance(delivery, Delivered):
                region, seconds = (delivery.region.offset, delivery.region.nbytes), delivery.seconds
            dtype, report = embedding.dtype.label, outcome.report
            return Placed(number, key, dtype, embedding.shape, embedding.kept, report, region, seconds)
        read: memoryview | _Copy = embedding.data
        offset = self._memory.arena.offset_of(embedding.data)
        if offset is None:
            read = self._copied(embedding.data)
            offset = self._memory.arena.offset_of(read.data)
            assert offset is not None
        self._sessions[number].rows[key] = read
        return Rows(
            number,
            key,
            offset,
            len(embedding.data),
            embedding.dtype.label,
            embedding.shape,
            embedding.kept,
            outcome.report,
            delivery.reason if delivery else "",
        )

    def _copied(self, source: memoryview) -> _Copy:
        copy = self._copies.get(id(source))
        if copy is None:
            copy = _Copy(source, self._memory.allocate(len(source)))
            np.frombuffer(copy.data, np.uint8)[:] = np.frombuffer(source, np.uint8)
            self._copies[id(source)] = copy
        return copy


def _in_block(item: Item, block: memoryview) -> Item:
    return item.filled(block[: item.nbytes])


def _submit(opened: _Open, items: Mapping[int, Item], digests: Mapping[int, bytes]) -> list[int] | None:
    if not opened.session.try_admit(items):
        return None
    opened.session.queue(items, digests)
    return []


def _find(opened: _Open, key: int, item: Item, digest: bytes) -> list[int] | None:
    answered = opened.session.try_answer(key, item, digest)
    return None if answered is None else [0] * answered


def not_ready(message: SessionMessage) -> ToRpc | None:
    """The reply to a message that came before the model was loaded."""
    if isinstance(message, Reserve | Admit | Find | Queue | Submit | Ask):
        return Reply(message.number, [], pickled(Unavailable("the model is still loading")))
    return None


def _received(entry: tuple[int, ItemForm | LookupForm]) -> tuple[int, Item | CacheLookup]:
    key, form = entry
    return key, item_of(form) if isinstance(form, ItemForm) else lookup_of(form)


def _cannot_fail(fault: Exception) -> None:
    """An engine of this process settles every item itself."""
    raise AssertionError(fault)
