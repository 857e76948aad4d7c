"""Children that are lent for a job each. Used on one event loop. Standard library only."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Generic, TypeVar

from vitwire_children.jobs import Child
from vitwire_children.serving import Fault, NotDone

_log = logging.getLogger(__name__)
C = TypeVar("C", bound=Child)


class Pool(Generic[C]):
    """Children that are started ahead, or when they are needed; those that died are replaced then."""

    def __init__(
        self, start: Callable[[], Awaitable[C]], most: int, changed: Callable[[int, int], None] = lambda *_: None
    ) -> None:
        """At most `most` children; `changed` is called with their number, and the number of those that have a job."""
        self._begin = start
        self._free = asyncio.Semaphore(most)
        self._changed = changed
        self._idle: list[C] = []
        self._all: set[C] = set()
        self._returning: set[asyncio.Task[None]] = set()
        self._closed = False

    async def start(self, count: int) -> None:
        """Start children ahead of jobs."""
        for child in await asyncio.gather(*(self._take() for _ in range(count)), return_exceptions=True):
            if isinstance(child, Child):
                await self._give_back(child)

    @asynccontextmanager
    async def lent(self, returned: Callable[[], None]) -> AsyncIterator[C]:
        """A child for the block, as soon as one is free. Raises NotDone if none can be started, or once it is closed.

        If the block is cancelled, a child that starts or works is waited for, not replaced; then calls `returned`.
        """
        getting = asyncio.create_task(self._take())

        async def take_back() -> None:
            with suppress(NotDone):  # there was no child
                try:
                    child = await getting
                    await child.idle()
                    await self._give_back(child)
                finally:
                    returned()

        try:
            yield await asyncio.shield(getting)
        finally:
            task = asyncio.create_task(take_back())
            self._returning.add(task)
            task.add_done_callback(self._returning.discard)
            await asyncio.sleep(0)  # the next job finds a child that is idle

    async def close(self) -> None:
        """End all children, at once."""
        self._closed = True
        returning = list(self._returning)
        for task in returning:
            task.cancel()
        await asyncio.gather(*returning, return_exceptions=True)
        await asyncio.gather(*(child.close() for child in self._all))
        self._all.clear()

    async def _take(self) -> C:
        await self._free.acquire()
        try:
            while self._idle and not self._closed:
                child = self._idle.pop()
                if child.is_alive:
                    self._count()
                    return child
                await self._drop(child)
            return await self._added()
        except BaseException:
            self._free.release()
            raise

    async def _added(self) -> C:
        if not self._closed:
            child = await self._begin()
            if not self._closed:
                self._all.add(child)
                self._count()
                return child
            await child.close()
        raise NotDone(Fault.LOST, "its process is stopping")

    async def _give_back(self, child: C) -> None:
        self._free.release()
        if child.is_alive:
            self._idle.append(child)
            self._count()
        else:
            await self._drop(child)

    async def _drop(self, child: C) -> None:
        await child.close()
        self._all.discard(child)
        self._count()
        _log.warning("%s %d ended (exit %s)", child.noun, child.process.pid, child.process.returncode)

    def _count(self) -> None:
        self._changed(len(self._all), len(self._all) - len(self._idle))
