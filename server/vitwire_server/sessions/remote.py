"""Sessions of an engine in another process."""

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
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
"""Bytes that are copied before other RPCs get their turn."""


@dataclass(slots=True)
class RemoteSessions:
    """See Sessions. Receives what the engine's process sends of sessions."""

    link: Link[messages.ToRpc, messages.ToEngine]
    arena: Arena
    digest_seed: int | None
    _numbers: Iterator[int] = field(default_factory=count)
    _open: dict[int, tuple[Settle, Fail]] = field(default_factory=dict)
    _replies: dict[int, asyncio.Future[list[int]]] = field(default_factory=dict)
    _spares: deque[tuple[int, int]] = field(default_factory=deque)
    """Offset and size of blocks that items may be written into."""
    _fault: Exception | None = None
    """The error of every request; None while the engine's process responds."""

    def open(self, opening: Opening, settle: Settle, fail: Fail) -> "RemoteSession":
        session = next(self._numbers)
        self._open[session] = settle, fail
        self.link.send(messages.Open(session, opening))
        return RemoteSession(self, session)

    def receive(self, message: messages.ToSession) -> None:
        match message:
            case messages.Spares():
                self._spares.extend((offset, message.nbytes) for offset in message.offsets)
            case messages.Reply():
                future = self._replies.pop(message.number, None)
                if future is None or future.done():  # the RPC was cancelled
                    return
                if message.error:
                    future.set_exception(unpickled(message.error, EncoderError))
                else:
                    future.set_result(message.offsets)
            case messages.Fault() if message.session in self._open:
                self._open[message.session][0](message.key, unpickled(message.error, EncoderError))
            case messages.Done() if message.session in self._open:
                rows = self.arena.view(message.offset, message.nbytes).toreadonly()
                self._open[message.session][0](message.key, encoded_of(message, rows))

    def lost(self, fault: Exception) -> None:
        """The engine's process is gone or silent: every RPC that works with it, now or later, ends with `fault`."""
        self._fault = fault
        for _, fail in self._open.values():
            fail(fault)
        for future in self._replies.values():
            if not future.done():
                future.set_exception(fault)
        self._replies.clear()

    def regained(self) -> None:
        """The engine's process responds again."""
        self._fault = None

    def release(self, session: int, key: int) -> None:
        """An item is not needed any more."""
        if session in self._open:
            self.link.send(messages.Release(session, key))

    def closed(self, session: int) -> None:
        """A session is over."""
        if self._open.pop(session, None):
            self.link.send(messages.Close(session))

    def take_spares(self, items: Collection[Item | CacheLookup]) -> list[int] | None:
        """Offsets of a spare block for each item; None unless all have bytes, which fit and are copied in one turn."""
        sizes = [item.nbytes for item in items if isinstance(item, Item)]
        if not len(sizes) == len(items) <= len(self._spares) or sum(sizes) > _COPIED_BYTES:
            return None
        if any(size > nbytes for size, (_, nbytes) in zip(sizes, self._spares, strict=False)):
            return None
        return [self._spares.popleft()[0] for _ in items]

    def check(self, session: int) -> None:
        """Raises Unavailable if the session is closed or the engine's process is gone."""
        if session not in self._open:
            raise Unavailable("the RPC has ended")
        if self.link.lost.is_set():
            raise Unavailable("the engine's process ended")
        if self._fault:
            raise Unavailable(str(self._fault))

    async def request(self, session: int, kind: Callable[..., messages.Requests], *fields: object) -> list[int]:
        """The engine's reply to a message of this kind. Raises EncoderError."""
        self.check(session)
        number = next(self._numbers)
        future: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        self._replies[number] = future
        self.link.send(kind(number, session, *fields))
        try:
            return await future
        finally:
            self._replies.pop(number, None)


class RemoteSession:
    """See Session. Between `close` and the engine's notice of it nothing is written: one task does both."""

    def __init__(self, engine: RemoteSessions, session: int) -> None:
        self._engine = engine
        self._session = session
        self._request = partial(engine.request, session)
        self._reserved: set[int] = set()

    async def reserve(self, key: int, item: Item) -> memoryview:
        (offset,) = await self._request(messages.Reserve, key, form_of(item))
        self._reserved.add(key)
        return self._engine.arena.view(offset, item.nbytes)

    async def answer(self, key: int, item: Item, digest: bytes) -> bool:
        return bool(await self._request(messages.Find, key, form_of(item), digest))

    async def submit(self, items: Mapping[int, Item | CacheLookup], digests: Mapping[int, bytes]) -> None:
        arena, engine = self._engine.arena, self._engine
        engine.check(self._session)
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
        self._engine.release(self._session, key)

    def close(self) -> None:
        self._engine.closed(self._session)


def _copied(arena: Arena, offset: int, item: Item) -> Iterator[None]:
    """Copy an item's bytes into the arena; yields after each part, so that other RPCs may get their turn."""
    for tensor in (item.pixels, item.crops):
        data = np.frombuffer(tensor.data, np.uint8) if tensor and tensor.nbytes else np.empty(0, np.uint8)
        for start in range(0, len(data), _COPIED_BYTES):
            part = data[start : start + _COPIED_BYTES]
            arena.array(offset + start, len(part))[:] = part
            yield
        offset += len(data)
