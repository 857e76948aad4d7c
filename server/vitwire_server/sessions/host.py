"""The engine's end of a link: sessions of the RPCs of another process."""

import pickle
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
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
"""Spare blocks that a process is supplied with, and the size of each."""
_MOST_SPARES = 2 * _SPARES
"""Most spare blocks of a process. Blocks of answered items become spare again while half of the arena is free."""


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
    spares: dict[int, tuple[int, memoryview]] = field(default_factory=dict)
    """Spare blocks of items that the engine has, with their offsets."""
    rows: dict[int, memoryview | _Copy] = field(default_factory=dict)
    """Rows that are being read."""
    waiting: list[tuple[messages.Requests, Mapping[int, Item]]] = field(default_factory=list)
    """Requests that wait until the session releases what it holds, and their items in spare blocks."""


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

    def receive(self, message: messages.Requests | messages.Release | messages.Close) -> None:
        number = message.session
        match message:
            case messages.Close():
                if opened := self._sessions.pop(number, None):  # else its first request came before the model
                    opened.session.close()
            case messages.Release(key=key):
                self._release(self._sessions[number], key)
            case messages.Submit():
                opened = self._opened(message)
                self._reply(opened, message, self._submitted(opened, message))
            case _:
                self._reply(self._opened(message), message, {})
        if len(self._spares) <= _SPARES // 2:
            self._grant()

    def close(self) -> None:
        """The process is gone: end its sessions."""
        while self._sessions:
            self._sessions.popitem()[1].session.close()
        self._spares.clear()

    def _opened(self, message: messages.Requests) -> _Open:
        """The session of a request, which the first one opens."""
        number, opening = message.session, message.opening
        if opening is None:
            return self._sessions[number]
        session = self.engine.open(opening, partial(self._settle, number), fail=lambda _: None)
        opened = self._sessions[number] = _Open(session, opening.priority)
        return opened

    def _release(self, opened: _Open, key: int) -> None:
        """The item is over; what waited for that is tried again."""
        opened.unfilled.pop(key, None)
        opened.spares.pop(key, None)
        opened.rows.pop(key, None)
        opened.session.release(key)
        waiting, opened.waiting = opened.waiting, []
        for message, submitted in waiting:
            self._reply(opened, message, submitted)

    def _settle(self, number: int, key: int, outcome: Outcome) -> None:
        if isinstance(outcome, Encoded):
            try:
                self.link.send(self._done(number, key, outcome))
                return
            except EncoderError as error:
                outcome = error
        self.link.send(messages.Fault(number, key, pickle.dumps(outcome)))

    def _reply(self, opened: _Open, message: messages.Requests, submitted: Mapping[int, Item]) -> None:
        """Do what is requested and reply; try again after each release while the session holds what is missing."""
        try:
            offsets = self._offsets(opened, message, submitted)
        except EncoderError as error:
            self.link.send(messages.Reply(message.number, [], pickle.dumps(error)))
            return
        if offsets is None:
            opened.waiting.append((message, submitted))
        else:
            self.link.send(messages.Reply(message.number, offsets))

    def _offsets(self, opened: _Open, message: messages.Requests, submitted: Mapping[int, Item]) -> list[int] | None:
        """The offsets to reply; None while the session holds what is missing. Raises EncoderError."""
        session = opened.session
        match message:
            case messages.Submit(digests=digests):
                if not session.try_admit(submitted):
                    return None
                session.queue(submitted, digests)
            case messages.Queue():
                session.queue(_filled(opened, message), message.digests)
            case messages.Admit():
                return self._admit(opened, {key: received(form) for key, form in message.items.items()})
            case messages.Reserve(key=key):
                return self._reserve(opened, key, item_of(message.item))
            case messages.Find(key=key, digest=digest):
                answered = session.try_answer(key, item_of(message.item), digest)
                return None if answered is None else [0] * answered
            case messages.Ask(tokens=tokens):
                return [int(1e6 * self.engine.intake.forecast(opened.priority, tokens))]
        return []

    def _submitted(self, opened: _Open, message: messages.Submit) -> dict[int, Item]:
        """The items of spare blocks, which are in use from now on."""
        items = {}
        for (key, form), offset in zip(message.items.items(), message.blocks, strict=True):
            block = self._spares.pop(offset)
            opened.spares[key] = offset, block
            items[key] = item_of(form).filled(block)
        return items

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
        blocks: dict[int, memoryview] = {}
        with suppress(Overloaded):
            for _ in range(min(missing, self._room() // _SPARE_BYTES)):
                offset, block = self.memory.placed(_SPARE_BYTES)
                blocks[offset] = block
        if blocks:
            self._spares |= blocks
            self.link.send(messages.Spares(list(blocks), _SPARE_BYTES))

    def _room(self) -> int:
        """Bytes of the arena's free half that are left for spare blocks; negative if less than half is free."""
        return self.memory.free - self.memory.arena.size // 2

    def _done(self, number: int, key: int, outcome: Encoded) -> messages.Done:
        """With the place of rows that are returned. Cached ones lie elsewhere: all readers share one copy.

        Raises Overloaded.
        """
        embedding, delivery, opened = outcome.embedding, outcome.delivery, self._sessions[number]
        done = messages.Done(number, key, embedding.dtype.label, embedding.shape, embedding.kept, outcome.report)
        if isinstance(delivery, Delivered):
            done.delivered = delivery
        elif isinstance(delivery, Stored):
            done.is_stored = True
        else:
            read: memoryview | _Copy = embedding.data
            offset = self.memory.arena.offset_of(embedding.data)
            if offset is None:
                read = self._copied(embedding.data)
                offset = self._offset(read.data)
            opened.rows[key] = read
            done.offset, done.nbytes = offset, len(embedding.data)
            done.fallback = delivery.reason if delivery else ""
            done.new = outcome.new
        if key in opened.spares and not outcome.is_partial:  # the engine has read the item's bytes
            offset, block = opened.spares.pop(key)
            # The engine copies bytes that are not pinned, so those blocks are used once.
            is_pinned = self.memory.is_kept(self.memory.arena.address + offset, _SPARE_BYTES)
            if is_pinned and (len(self._spares) < _SPARES or (len(self._spares) < _MOST_SPARES and self._room() > 0)):
                self._spares[offset] = block
                done.spare = offset
        return done

    def _copied(self, source: memoryview) -> _Copy:
        copy = self._copies.get(id(source))
        if copy is None:
            copy = _Copy(source, self.memory.allocate(len(source)))
            np.frombuffer(copy.data, np.uint8)[:] = np.frombuffer(source, np.uint8)
            self._copies[id(source)] = copy
        return copy


def _filled(opened: _Open, message: messages.Queue) -> dict[int, Item]:
    """The items that have their bytes now, and their regions."""
    items = {key: opened.unfilled.pop(key) for key in message.items}
    for key, (region, on_device) in message.regions.items():
        items[key] = replace(items[key], region=region, on_device=on_device)
    return items


def not_ready(message: messages.ToEngine) -> messages.Reply | None:
    """The reply to a message that came before the model was loaded."""
    if isinstance(message, messages.Request):
        return messages.Reply(message.number, [], pickle.dumps(Unavailable("the model is still loading")))
    return None
