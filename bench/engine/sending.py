"""A process with a client of its own, as a router is: what it sends takes no time of the engine's front end."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, Self

from bench.engine.answers import Answer

from vitwire import Accepted, AsyncClient, Item, Stored, VitwireError


class Heard(NamedTuple):
    """The server accepted all items of a request, or stored them; or its error. Times are monotonic."""

    name: str
    at: float
    reports: Sequence[Any] = ()
    """Of stored items."""
    error: VitwireError | None = None


@dataclass(slots=True)
class Sender:
    """Has items stored that were handed to it before. Used on one event loop."""

    _pipe: Connection
    _process: Any
    _waiting: dict[str, asyncio.Future[float]] = field(default_factory=dict)
    _answers: dict[str, Answer] = field(default_factory=dict)

    @classmethod
    async def start(cls, target: str) -> Self:
        """Start the process, on the running loop."""
        own, other = get_context("spawn").Pipe()
        process = get_context("spawn").Process(target=_serve, args=(other, target), daemon=True)
        process.start()
        other.close()
        sender = cls(own, process)
        asyncio.get_running_loop().add_reader(own.fileno(), sender._hear)
        return sender

    def hand_over(self, name: str, items: Sequence[Item]) -> None:
        """The items of a request, which is not sent yet."""
        self._pipe.send((name, list(items)))

    async def accepted(self, name: str, answer: Answer) -> float:
        """Send the items; returns when the server had accepted all. Later `answer` is told when they were stored.

        Raises VitwireError for what fails before.
        """
        self._waiting[name] = asyncio.get_running_loop().create_future()
        self._answers[name] = answer
        self._pipe.send((name, None))
        return await self._waiting[name]

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pipe.fileno())
        self._pipe.close()
        self._process.join()

    def _hear(self) -> None:
        try:
            heard: Heard = self._pipe.recv()
        except EOFError:
            asyncio.get_running_loop().remove_reader(self._pipe.fileno())
            for each in self._waiting.values():
                each.set_exception(RuntimeError("the process that sends has ended"))
            return
        waiting = self._waiting.pop(heard.name, None)
        if heard.reports:
            self._answers.pop(heard.name).note_server("stored", heard.at, heard.reports)
        elif waiting and heard.error:
            waiting.set_exception(heard.error)
        elif waiting:
            waiting.set_result(heard.at)


def _serve(pipe: Connection, target: str) -> None:
    asyncio.run(_send(pipe, target))


async def _send(pipe: Connection, target: str) -> None:
    """Until the other end of the pipe is closed."""
    loop, over = asyncio.get_running_loop(), asyncio.Event()
    items: dict[str, Sequence[Item]] = {}
    tasks: set[asyncio.Task[None]] = set()

    def told() -> None:
        try:
            name, given = pipe.recv()
        except EOFError:
            loop.remove_reader(pipe.fileno())
            over.set()
            return
        if given is None:
            tasks.add(task := asyncio.create_task(_store(client, name, items.pop(name), pipe)))
            task.add_done_callback(tasks.discard)
        else:
            items[name] = given

    async with AsyncClient(target, affinity=True) as client:  # of several encoders, the one that the engine asks
        loop.add_reader(pipe.fileno(), told)
        await over.wait()


async def _store(client: AsyncClient, name: str, items: Sequence[Item], pipe: Connection) -> None:
    """Failures before all items are accepted are told; the engine reports later ones."""
    waiting = set(range(len(items)))
    stored: list[Stored] = []
    try:
        async with aclosing(client.iter_store(items)) as results:
            async for index, result in results:
                if isinstance(result, VitwireError):
                    raise result
                if isinstance(result, Stored):
                    stored.append(result)
                if isinstance(result, Accepted):
                    waiting.discard(index)
                    if not waiting:
                        pipe.send(Heard(name, time.monotonic()))
    except VitwireError as error:
        pipe.send(Heard(name, time.monotonic(), error=error))
    else:
        pipe.send(Heard(name, time.monotonic(), [each.report for each in stored]))
