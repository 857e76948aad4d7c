"""Sessions of an engine in another process."""

import asyncio
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import count

import numpy as np

from vitwire_server.core.errors import EncoderError, Unavailable
from vitwire_server.core.items import CacheLookup, Item
from vitwire_server.sessions.arena import Arena
from vitwire_server.sessions.link import Link
from vitwire_server.sessions.messages import (
    Admit,
    Ask,
    Close,
    Done,
    Fault,
    Find,
    Open,
    Queue,
    Release,
    Reply,
    Requests,
    Reserve,
    Spare,
    Submit,
    ToEngine,
    ToRpc,
    ToSession,
    encoded_of,
    form_of,
    unpickled,
)
from vitwire_server.sessions.session import Fail, Opening, Settle

_COPIED_BYTES = 4 << 20
"""Bytes that are copied before other RPCs get their turn."""


class RemoteSessions:
    """See Sessions. Receives what the engine's process sends of sessions."""

    def __init__(self, link: Link[ToRpc, ToEngine], arena: Arena, digest_seed: int | None) -> None:
        self.link = link
        self.arena = arena
        self.digest_seed = digest_seed
        self._numbers = count()
        self._open: dict[int, tuple[Settle, Fail]] = {}
        self._replies: dict[int, asyncio.Future[list[int]]] = {}
        self._spares: list[Spare] = []
        self._fault: Exception | None = None
        """Why requests fail at once; None while the engine's process responds."""

    def open(self, opening: Opening, settle: Settle, fail: Fail) -> "RemoteSession":
        """See Sessions."""
        session = next(self._numbers)
        self._open[session] = settle, fail
        self.link.send(Open(session, opening))
        return RemoteSession(self, session)

    def receive(self, message: ToSession) -> None:
        """Handle a message of the engine."""
        match message:
            case Spare():
                self._spares.append(message)
            case Reply():
                future = self._replies.pop(message.number, None)
                if future is None or future.done():  # the RPC was cancelled
                    return
                if message.error:
                    future.set_exception(unpickled(message.error, EncoderError))
                else:
                    future.set_result(message.offsets)
            case Fault() if message.session in self._open:
                self._open[message.session][0](message.key, unpickled(message.error, EncoderError))
            case Done() if message.session in self._open:
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
            self.link.send(Release(session, key))

    def closed(self, session: int) -> None:
        """A session is over."""
        if self._open.pop(session, None):
            self.link.send(Close(session))

    def take_spares(self, items: Collection[Item | CacheLookup]) -> list[int] | None:
        """Offsets of a spare block for each item; None unless all items have bytes and fit."""
        if len(items) > len(self._spares):
            return None
        if not all(
            isinstance(item, Item) and item.nbytes <= spare.nbytes
            for item, spare in zip(items, self._spares, strict=False)
        ):
            return None
        taken, self._spares = self._spares[: len(items)], self._spares[len(items) :]
        return [spare.offset for spare in taken]

    def check(self, session: int) -> None:
        """Raises Unavailable if the session is closed or the engine's process is gone."""
        if session not in self._open:
            raise Unavailable("the RPC has ended")
        if self.link.lost.is_set():
            raise Unavailable("the engine's process ended")
        if self._fault:
            raise Unavailable(str(self._fault))

    async def request(self, message: Requests) -> list[int]:
        """The engine's reply. Raises EncoderError."""
        self.check(message.session)
        future: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        self._replies[message.number] = future
        self.link.send(message)
        try:
            return await future
        finally:
            self._replies.pop(message.number, None)

    def number(self) -> int:
        """A number for a request."""
        return next(self._numbers)


class RemoteSession:
    """See Session. Between `close` and the engine's notice of it nothing is written: one task does both."""

    def __init__(self, engine: RemoteSessions, session: int) -> None:
        self._engine = engine
        self._session = session
        self._reserved: set[int] = set()

    async def reserve(self, key: int, item: Item) -> memoryview:
        """See Session."""
        engine = self._engine
        (offset,) = await engine.request(Reserve(engine.number(), self._session, key, form_of(item)))
        self._reserved.add(key)
        return engine.arena.view(offset, item.nbytes)

    async def answer(self, key: int, item: Item, digest: bytes) -> bool:
        """See Session."""
        engine = self._engine
        return bool(await engine.request(Find(engine.number(), self._session, key, form_of(item), digest)))

    async def submit(self, items: Mapping[int, Item | CacheLookup], digests: Mapping[int, bytes]) -> None:
        """See Session."""
        engine = self._engine
        engine.check(self._session)
        new = {key: item for key, item in items.items() if key not in self._reserved}
        if new and len(new) == len(items) and (blocks := engine.take_spares(new.values())):
            await self._submit({key: item for key, item in new.items() if isinstance(item, Item)}, blocks, digests)
            return
        if new:
            forms = {key: form_of(item) for key, item in new.items()}
            offsets = await engine.request(Admit(engine.number(), self._session, forms))
            work = [item for item in new.values() if isinstance(item, Item)]
            for offset, item in zip(offsets, work, strict=True):
                for at, part in _parts(offset, item):
                    engine.arena.array(at, len(part))[:] = part
                    await asyncio.sleep(0)
        ready = {key: item for key, item in items.items() if isinstance(item, Item)}
        self._reserved.difference_update(ready)
        if ready:
            regions = {key: (item.region, item.on_device) for key, item in ready.items() if item.region}
            await engine.request(Queue(engine.number(), self._session, list(ready), dict(digests), regions))

    async def forecast(self, tokens: int) -> float:
        """See Session."""
        (microseconds,) = await self._engine.request(Ask(self._engine.number(), self._session, tokens))
        return microseconds / 1e6

    def release(self, key: int) -> None:
        """See Session."""
        self._reserved.discard(key)
        self._engine.release(self._session, key)

    def close(self) -> None:
        """See Session."""
        self._engine.closed(self._session)

    async def _submit(self, items: Mapping[int, Item], blocks: Sequence[int], digests: Mapping[int, bytes]) -> None:
        """Items that fit spare blocks; nothing is awaited before the engine is informed of the blocks' use."""
        engine = self._engine
        for offset, item in zip(blocks, items.values(), strict=True):
            for at, part in _parts(offset, item):
                engine.arena.array(at, len(part))[:] = part
        forms = {key: form_of(item) for key, item in items.items()}
        await engine.request(Submit(engine.number(), self._session, forms, list(blocks), dict(digests)))


def _parts(offset: int, item: Item) -> Iterator[tuple[int, np.ndarray[tuple[int], np.dtype[np.uint8]]]]:
    """An item's bytes in parts that are copied at once, and where each goes in the arena."""
    for tensor in (item.pixels, item.crops):
        data = np.frombuffer(tensor.data, np.uint8) if tensor and tensor.nbytes else np.empty(0, np.uint8)
        for start in range(0, len(data), _COPIED_BYTES):
            yield offset + start, data[start : start + _COPIED_BYTES]
        offset += len(data)
