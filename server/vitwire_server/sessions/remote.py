"""Sessions of an engine in another process."""

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from vitwire_server.core.errors import EncoderError, Unavailable
from vitwire_server.core.items import CacheLookup, Item
from vitwire_server.sessions import messages
from vitwire_server.sessions.arena import Arena
from vitwire_server.sessions.link import Link
from vitwire_server.sessions.messages import encoded_of, form_of, unpickled
from vitwire_server.sessions.session import Fail, Opening, Settle

_COPIED_BYTES = 4 << 20
"""Bytes that are copied before other RPCs run."""


@dataclass(slots=True)
class RemoteSessions:
    """See Sessions. Receives what the engine's process sends of sessions."""

    link: Link[messages.ToRpc, messages.ToEngine]
    arena: Arena
    digest_seed: int | None
    _numbers: Iterator[int] = field(default_factory=count)
    _open: "dict[int, RemoteSession]" = field(default_factory=dict)
    _replies: dict[int, asyncio.Future[list[int]]] = field(default_factory=dict)
    _spares: list[int] = field(default_factory=list)
    """Offsets of blocks that items may be written into."""
    _spare_bytes: int = 0
    """Bytes of each spare block."""
    _fault: Exception | None = None
    """The error of every request; None while the engine's process responds."""

    def open(self, opening: Opening, settle: Settle, fail: Fail) -> "RemoteSession":
        number = self.next_number()
        session = self._open[number] = RemoteSession(self, number, opening, settle, fail)
        return session

    def receive(self, message: messages.ToSession) -> None:
        match message:
            case messages.Done():
                if message.spare is not None:
                    self._spares.append(message.spare)
                if session := self._open.get(message.session):
                    rows = self.arena.view(message.offset, message.nbytes).toreadonly()
                    session.settle(message.key, encoded_of(message, rows))
            case messages.Reply():
                future = self._replies.pop(message.number, None)
                if future is None or future.done():  # the RPC was cancelled
                    return
                if message.error:
                    future.set_exception(unpickled(message.error, EncoderError))
                else:
                    future.set_result(message.offsets)
            case messages.Spares():
                self._spares += message.offsets
                self._spare_bytes = message.nbytes
            case messages.Fault() if session := self._open.get(message.session):
                session.settle(message.key, unpickled(message.error, EncoderError))

    def lost(self, fault: Exception) -> None:
        """The engine's process is gone or silent: every RPC that works with it, now or later, ends with `fault`."""
        self._fault = fault
        for session in self._open.values():
            session.fail(fault)
        for future in self._replies.values():
            if not future.done():
                future.set_exception(fault)
        self._replies.clear()

    def regained(self) -> None:
        """The engine's process responds again."""
        self._fault = None

    def closed(self, session: int) -> bool:
        """A session is over. False if it was over before."""
        return self._open.pop(session, None) is not None

    def take_spares(self, items: Collection[Item | CacheLookup]) -> list[int] | None:
        """Offsets of a spare block for each item; None unless all have bytes, which fit and are copied at once."""
        sizes = [item.nbytes for item in items if isinstance(item, Item)]
        if not len(sizes) == len(items) <= len(self._spares):
            return None
        if sum(sizes) > _COPIED_BYTES or max(sizes) > self._spare_bytes:
            return None
        return [self._spares.pop() for _ in items]  # those that were used last are in the processor's caches

    def has(self, session: int) -> bool:
        """Whether a session is open."""
        return session in self._open

    def next_number(self) -> int:
        """A number that no session and no request has."""
        return next(self._numbers)

    def check(self, session: int) -> None:
        """Raises Unavailable if the session is closed or the engine's process is gone."""
        if session not in self._open:
            raise Unavailable("the RPC has ended")
        if self.link.lost.is_set():
            raise Unavailable("the engine's process ended")
        if self._fault:
            raise Unavailable(str(self._fault))

    async def reply(self, message: messages.Requests) -> list[int]:
        """The engine's reply to a request. Raises EncoderError."""
        future: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        self._replies[message.number] = future
        self.link.send(message)
        try:
            return await future
        finally:
            self._replies.pop(message.number, None)


class RemoteSession:
    """See Session. Between `close` and the engine's notice of it nothing is written: one task does both."""

    def __init__(self, engine: RemoteSessions, number: int, opening: Opening, settle: Settle, fail: Fail) -> None:
        self.settle = settle
        self.fail = fail
        self._engine = engine
        self._number = number
        self._opening: Opening | None = opening
        """Until the first request, which opens the session in the engine's process."""
        self._reserved: set[int] = set()

    async def reserve(self, key: int, item: Item) -> memoryview:
        (offset,) = await self._request(messages.Reserve, key, form_of(item))
        self._reserved.add(key)
        return self._engine.arena.view(offset, item.nbytes)

    async def answer(self, key: int, item: Item, digest: bytes) -> bool:
        return bool(await self._request(messages.Find, key, form_of(item), digest))

    async def submit(self, items: Mapping[int, Item | CacheLookup], digests: Mapping[int, bytes]) -> None:
        arena, engine = self._engine.arena, self._engine
        engine.check(self._number)
        new = {key: item for key, item in items.items() if key not in self._reserved}
        forms = {key: form_of(item) for key, item in new.items()}
        ready = {key: item for key, item in items.items() if isinstance(item, Item)}
        if new and len(new) == len(items) and (blocks := engine.take_spares(new.values())):
            for offset, item in zip(blocks, ready.values(), strict=True):
                for _ in _copied(arena, offset, item):  # nothing is awaited before the engine knows the blocks' use
                    pass
            await self._request(messages.Submit, forms, blocks, dict(digests))
            return
        if new:
            offsets = await self._request(messages.Admit, forms)
            work = [item for item in new.values() if isinstance(item, Item)]
            for offset, item in zip(offsets, work, strict=True):
                for _ in _copied(arena, offset, item):
                    await asyncio.sleep(0)
        self._reserved.difference_update(ready)
        if ready:
            regions = {key: (item.region, item.on_device) for key, item in ready.items() if item.region}
            await self._request(messages.Queue, list(ready), dict(digests), regions)

    async def forecast(self, tokens: int) -> float:
        (microseconds,) = await self._request(messages.Ask, tokens)
        return microseconds / 1e6

    def release(self, key: int) -> None:
        self._reserved.discard(key)
        if self._engine.has(self._number) and self._opening is None:
            self._engine.link.send(messages.Release(self._number, key))

    def close(self) -> None:
        if self._engine.closed(self._number) and self._opening is None:
            self._engine.link.send(messages.Close(self._number))

    async def _request(self, kind: Callable[..., messages.Requests], *fields: object) -> list[int]:
        self._engine.check(self._number)
        opening, self._opening = self._opening, None
        return await self._engine.reply(kind(self._number, self._engine.next_number(), opening, *fields))


def _copied(arena: Arena, offset: int, item: Item) -> Iterator[None]:
    """Copy an item's bytes into the arena; yields after each part, so that other RPCs may run."""
    for tensor in (item.pixels, item.crops):
        data = np.frombuffer(tensor.data, np.uint8) if tensor and tensor.nbytes else np.empty(0, np.uint8)
        for start in range(0, len(data), _COPIED_BYTES):
            part = data[start : start + _COPIED_BYTES]
            arena.array(offset + start, len(part))[:] = part
            yield
        offset += len(data)
