"""The engine's end of a link: sessions of the RPCs of another process."""

import pickle
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from weakref import WeakValueDictionary

import numpy as np

from vitwire_server.core.delivery import Delivered, Stored
from vitwire_server.core.errors import EncoderError, Overloaded, Unavailable
from vitwire_server.core.items import CacheLookup, Item
from vitwire_server.core.reports import Encoded, Outcome
from vitwire_server.scheduling.tickets import Priority
from vitwire_server.sessions import messages
from vitwire_server.sessions.arena import ArenaMemory
from vitwire_server.sessions.link import Link
from vitwire_server.sessions.local import LocalSession, LocalSessions
from vitwire_server.sessions.messages import item_of, received

_SPARES, _SPARE_BYTES = 16, 1 << 20
"""Most spare blocks of a process, and the size of each."""


@dataclass(slots=True, weakref_slot=True, eq=False)
class _Copy:
    """Rows of the cache, and their copy in the arena."""

    source: memoryview
    data: memoryview


@dataclass(slots=True)
class _Open:
    """A session, and the memory that the other process may use: it is free again when nothing here refers to it."""

    session: LocalSession
    priority: Priority
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


@dataclass(slots=True)
class SessionHost:
    """Runs the sessions of one process of RPCs. `close` ends all of them, which gives back what they hold."""

    engine: LocalSessions
    memory: ArenaMemory
    link: Link[messages.ToEngine, messages.ToRpc]
    _sessions: dict[int, _Open] = field(default_factory=dict)
    _spares: dict[int, memoryview] = field(default_factory=dict)
    """Blocks that the process may write into, by their offset."""
    _copies: WeakValueDictionary[int, _Copy] = field(default_factory=WeakValueDictionary)
    """Copies that are being read, by the identity of their source."""

    def receive(self, message: messages.OfSession) -> None:
        match message:
            case messages.Open():
                self._open(message)
            case messages.Release():
                self._sessions[message.session].release(message.key)
                self._grant()
            case messages.Close():
                self._sessions.pop(message.session).close()
                self._grant()
            case _:
                opened = self._sessions[message.session]
                self._reply(opened, message.number, self._attempt(opened, message))

    def close(self) -> None:
        """The process is gone: end its sessions."""
        sessions, self._sessions = self._sessions, {}
        self._spares.clear()
        for opened in sessions.values():
            opened.close()

    def _open(self, message: messages.Open) -> None:
        number = message.session

        def settle(key: int, outcome: Outcome) -> None:
            if isinstance(outcome, Encoded):
                try:
                    self.link.send(self._done(number, key, outcome))
                    return
                except EncoderError as error:
                    outcome = error
            self.link.send(messages.Fault(number, key, pickle.dumps(outcome)))

        opening = message.opening
        self._sessions[number] = _Open(self.engine.open(opening, settle, fail=lambda _: None), opening.priority)
        self._grant()

    def _attempt(self, opened: _Open, message: messages.Requests) -> Callable[[], list[int] | None]:
        """Does what is requested and returns the offsets to reply, or None while the session holds what is missing."""
        match message:
            case messages.Reserve(key=key):
                reserved = item_of(message.item)
                return lambda: self._reserve(opened, key, reserved)
            case messages.Admit():
                items = {key: received(form) for key, form in message.items.items()}
                return lambda: self._admit(opened, items)
            case messages.Find(key=key, digest=digest):
                sought = item_of(message.item)
                return lambda: _offsets(opened.session.try_answer(key, sought, digest))
            case messages.Queue():
                return lambda: _queue(opened, message)
            case messages.Submit(digests=digests):
                blocks = [self._spares.pop(offset) for offset in message.blocks]
                submitted = {}
                for (key, form), block in zip(message.items.items(), blocks, strict=True):
                    submitted[key] = item_of(form).filled(block)
                return lambda: _submit(opened, submitted, digests)
            case messages.Ask(tokens=tokens):
                return lambda: [int(1e6 * self.engine.intake.forecast(opened.priority, tokens))]

    def _reply(self, opened: _Open, number: int, attempt: Callable[[], list[int] | None]) -> None:
        """Reply with what `attempt` returns; while that is None, try again after each release of the session."""
        try:
            offsets = attempt()
        except EncoderError as error:
            self.link.send(messages.Reply(number, [], pickle.dumps(error)))
            return
        if offsets is None:
            opened.waiting.append(lambda: self._reply(opened, number, attempt))
        else:
            self.link.send(messages.Reply(number, offsets))

    def _reserve(self, opened: _Open, key: int, item: Item) -> list[int] | None:
        memory = opened.session.try_reserve(key, item)
        if memory is None:
            return None
        opened.unfilled[key] = item.filled(memory)
        return [self._offset(memory)]

    def _admit(self, opened: _Open, items: Mapping[int, Item | CacheLookup]) -> list[int] | None:
        if not opened.session.try_admit(items):
            return None
        work = {key: item for key, item in items.items() if isinstance(item, Item)}
        blocks = [self.memory.placed(item.nbytes) for item in work.values()]
        for (key, item), (_, memory) in zip(work.items(), blocks, strict=True):
            opened.unfilled[key] = item.filled(memory)
        return [offset for offset, _ in blocks]

    def _offset(self, memory: memoryview) -> int:
        offset = self.memory.arena.offset_of(memory)
        assert offset is not None, "it is in the arena"
        return offset

    def _grant(self) -> None:
        """Keep the process supplied with spare blocks while there is memory: they save small requests a round trip."""
        missing = _SPARES - len(self._spares)
        if missing < _SPARES // 2:
            return
        room = (self.memory.free - self.memory.arena.size // 2) // _SPARE_BYTES
        blocks: dict[int, memoryview] = {}
        with suppress(Overloaded):
            for _ in range(min(missing, room)):
                offset, block = self.memory.placed(_SPARE_BYTES)
                blocks[offset] = block
        if blocks:
            self._spares |= blocks
            self.link.send(messages.Spares(list(blocks), _SPARE_BYTES))

    def _done(self, number: int, key: int, outcome: Encoded) -> messages.Done:
        """With the place of rows that are returned. Cached ones lie elsewhere: all readers share one copy.

        Raises Overloaded.
        """
        embedding, delivery = outcome.embedding, outcome.delivery
        about = (number, key, embedding.dtype.label, embedding.shape, embedding.kept, outcome.report)
        if isinstance(delivery, Delivered | Stored):
            delivered = delivery if isinstance(delivery, Delivered) else None
            return messages.Done(*about, delivered=delivered, is_stored=delivered is None)
        read: memoryview | _Copy = embedding.data
        offset = self.memory.arena.offset_of(embedding.data)
        if offset is None:
            read = self._copied(embedding.data)
            offset = self._offset(read.data)
        self._sessions[number].rows[key] = read
        return messages.Done(*about, offset, len(embedding.data), fallback=delivery.reason if delivery else "")

    def _copied(self, source: memoryview) -> _Copy:
        copy = self._copies.get(id(source))
        if copy is None:
            copy = _Copy(source, self.memory.allocate(len(source)))
            np.frombuffer(copy.data, np.uint8)[:] = np.frombuffer(source, np.uint8)
            self._copies[id(source)] = copy
        return copy


def _queue(opened: _Open, message: messages.Queue) -> list[int]:
    items = {key: opened.unfilled.pop(key) for key in message.items}
    for key, (region, on_device) in message.regions.items():
        items[key] = replace(items[key], region=region, on_device=on_device)
    opened.session.queue(items, message.digests)
    return []


def _submit(opened: _Open, items: Mapping[int, Item], digests: Mapping[int, bytes]) -> list[int] | None:
    if not opened.session.try_admit(items):
        return None
    opened.session.queue(items, digests)
    return []


def _offsets(answered: bool | None) -> list[int] | None:
    return None if answered is None else [0] * answered


def not_ready(message: messages.OfSession) -> messages.Reply | None:
    """The reply to a message that came before the model was loaded."""
    if isinstance(message, messages.Request):
        return messages.Reply(message.number, [], pickle.dumps(Unavailable("the model is still loading")))
    return None
