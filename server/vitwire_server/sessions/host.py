"""The engine's end of a link: sessions of the RPCs of another process."""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field

import numpy as np

from vitwire_server.core.delivery import Delivered
from vitwire_server.core.errors import EncoderError, Unavailable
from vitwire_server.core.items import CacheLookup, Embedding, Item
from vitwire_server.core.reports import Encoded, Outcome
from vitwire_server.scheduling.tickets import Priority
from vitwire_server.sessions.arena import ArenaMemory
from vitwire_server.sessions.link import Link
from vitwire_server.sessions.local import LocalSession, LocalSessions
from vitwire_server.sessions.messages import (
    Admit,
    Close,
    Fault,
    ItemForm,
    LookupForm,
    Open,
    Placed,
    Queue,
    Release,
    Reply,
    Reserve,
    Rows,
    ToEngine,
    ToRpc,
    consumer_of,
    item_of,
    lookup_of,
    pickled,
)
from vitwire_server.sessions.session import Opening

SessionMessage = Open | Reserve | Admit | Queue | Release | Close


@dataclass(slots=True)
class _Open:
    """A session, and the memory that the other process may use: it is free again when nothing here refers to it."""

    session: LocalSession
    unfilled: dict[int, Item] = field(default_factory=dict)
    """Items whose bytes are being written."""
    rows: dict[int, Embedding] = field(default_factory=dict)
    """Rows that are being read."""
    tasks: set[asyncio.Task[None]] = field(default_factory=set)


class SessionHost:
    """Runs the sessions of one process of RPCs. `close` ends all of them, which gives back what they hold."""

    def __init__(self, engine: LocalSessions, memory: ArenaMemory, link: Link[ToEngine, ToRpc]) -> None:
        self._engine = engine
        self._memory = memory
        self._link = link
        self._sessions: dict[int, _Open] = {}

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
                session = self._engine.open(opening, lambda key, outcome: self._settle(number, key, outcome))
                self._sessions[number] = _Open(session)
            case Reserve():
                self._run(message, self._reserve(self._sessions[message.session], message))
            case Admit():
                self._run(message, self._admit(self._sessions[message.session], message))
            case Queue():
                self._queue(self._sessions[message.session], message)
            case Release():
                opened = self._sessions[message.session]
                opened.unfilled.pop(message.key, None)
                opened.rows.pop(message.key, None)
                opened.session.release(message.key)
            case Close():
                _end(self._sessions.pop(message.session))

    def close(self) -> None:
        """The process is gone: end its sessions."""
        sessions, self._sessions = self._sessions, {}
        for opened in sessions.values():
            _end(opened)

    def _run(self, message: Reserve | Admit, work: Coroutine[None, None, list[int]]) -> None:
        """Reply with what `work` returns; it may wait for other items of the session."""

        async def reply() -> None:
            try:
                self._link.send(Reply(message.number, await work))
            except EncoderError as error:
                self._link.send(Reply(message.number, [], pickled(error)))

        tasks = self._sessions[message.session].tasks
        task = asyncio.create_task(reply())
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async def _reserve(self, opened: _Open, message: Reserve) -> list[int]:
        item = item_of(message.item)
        return [self._unfilled(opened, message.key, item, await opened.session.reserve(message.key, item))]

    async def _admit(self, opened: _Open, message: Admit) -> list[int]:
        items = {key: _received(form) for key, form in message.items.items()}
        await opened.session.admit(items)
        work = {key: item for key, item in items.items() if isinstance(item, Item)}
        memory = {key: self._memory.allocate(item.nbytes) for key, item in work.items()}
        return [self._unfilled(opened, key, item, memory[key]) for key, item in work.items()]

    def _unfilled(self, opened: _Open, key: int, item: Item, memory: memoryview) -> int:
        """Keep an item until its bytes are written; returns the offset to write them to."""
        offset = self._memory.arena.offset_of(memory)
        assert offset is not None, "pixels are received in the arena"
        opened.unfilled[key] = item.filled(memory)
        return offset

    def _queue(self, opened: _Open, message: Queue) -> None:
        items = {key: opened.unfilled.pop(key) for key in message.items}
        try:
            opened.session.queue(items, message.digests)
            self._link.send(Reply(message.number, []))
        except EncoderError as error:
            self._link.send(Reply(message.number, [], pickled(error)))

    def _settle(self, number: int, key: int, outcome: Outcome) -> None:
        if isinstance(outcome, Encoded):
            try:
                self._link.send(self._rows(number, key, outcome))
                return
            except EncoderError as error:
                outcome = error
        self._link.send(Fault(number, key, pickled(outcome)))

    def _rows(self, number: int, key: int, outcome: Encoded) -> Rows | Placed:
        """Where the rows lie. Cached ones lie elsewhere, and are copied into the arena. Raises Overloaded."""
        embedding, delivery = outcome.embedding, outcome.delivery
        if isinstance(delivery, Delivered):
            region = (delivery.region.offset, delivery.region.nbytes)
            dtype, report = embedding.dtype.label, outcome.report
            return Placed(number, key, dtype, embedding.shape, embedding.kept, report, region, delivery.seconds)
        data = embedding.data
        offset = self._memory.arena.offset_of(data)
        if offset is None:
            data = self._memory.allocate(len(embedding.data))
            np.frombuffer(data, np.uint8)[:] = np.frombuffer(embedding.data, np.uint8)
            offset = self._memory.arena.offset_of(data)
            assert offset is not None
        self._sessions[number].rows[key] = Embedding(data, embedding.dtype, embedding.shape)
        return Rows(
            number,
            key,
            offset,
            len(data),
            embedding.dtype.label,
            embedding.shape,
            embedding.kept,
            outcome.report,
            delivery.reason if delivery else "",
        )


def not_ready(message: SessionMessage) -> ToRpc | None:
    """The reply to a message that came before the model was loaded."""
    if isinstance(message, Reserve | Admit | Queue):
        return Reply(message.number, [], pickled(Unavailable("the model is still loading")))
    return None


def _received(form: ItemForm | LookupForm) -> Item | CacheLookup:
    return item_of(form) if isinstance(form, ItemForm) else lookup_of(form)


def _end(opened: _Open) -> None:
    for task in opened.tasks:
        task.cancel()
    opened.session.close()
