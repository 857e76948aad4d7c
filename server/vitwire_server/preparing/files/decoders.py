"""Decoders on the CPU, as many as are needed, and the one on the model's device. Used on one event loop."""

import asyncio
import logging
from collections.abc import Callable

from vitwire_server.core.decoding import Fault
from vitwire_server.preparing.files.child import Child
from vitwire_server.preparing.files.messages import Measured, NotDecoded, Setup

_log = logging.getLogger(__name__)
DEVICE_SECONDS = 5.0
"""Of wall-clock time for a file on the device, which takes milliseconds: it was checked, and its size is bounded."""
_LEAST_PIXELS = 1 << 19
"""Of a picture: 448² was decoded faster on the CPU, and 1920 x 1080 on the device."""
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0
"""Seconds until the decoder on the device is started again, twice as long each time."""


class CpuDecoders:
    """Processes that are started ahead, or when they are needed; those that died are replaced then."""

    def __init__(self, setup: asyncio.Future[Setup], most: int, changed: Callable[[int, int], None]) -> None:
        """At most `most` processes; `changed` is called with their number, and the number of those that have a job."""
        self._setup = setup
        self._free = asyncio.Semaphore(most)
        self._changed = changed
        self._idle: list[Child] = []
        self._all: set[Child] = set()
        self.closed = False
        """Once true, no process is lent or started."""

    async def start(self, count: int) -> None:
        """Start `count` processes ahead of jobs."""
        for child in await asyncio.gather(*(self.take() for _ in range(count)), return_exceptions=True):
            if isinstance(child, Child):
                await self.give_back(child)

    async def take(self) -> Child:
        """A decoder for one job, as soon as one is free. Raises NotDecoded if none can be started, or once `closed`."""
        await self._free.acquire()
        try:
            return await self._taken()
        except BaseException:
            self._free.release()
            raise

    async def _taken(self) -> Child:
        while self._idle and not self.closed:
            child = self._idle.pop()
            if child.is_alive:
                self._count()
                return child
            await self._drop(child)
        if self.closed:
            raise _stopping()
        child = await Child.start(self._setup)
        if self.closed:
            await child.close()
            raise _stopping()
        self._all.add(child)
        self._count()
        _log.debug("decoder %d started", child.process.pid)
        return child

    async def give_back(self, child: Child) -> None:
        """Keep it for the next job, if it is alive."""
        self._free.release()
        if child.is_alive:
            child.discard()
            self._idle.append(child)
            self._count()
        else:
            await self._drop(child)

    async def close(self) -> None:
        self.closed = True
        await asyncio.gather(*(child.close() for child in self._all))
        self._all.clear()

    async def _drop(self, child: Child) -> None:
        await child.close()
        self._all.discard(child)
        self._count()
        _log.warning("decoder %d ended (exit %s)", child.process.pid, child.process.returncode)

    def _count(self) -> None:
        self._changed(len(self._all), len(self._all) - len(self._idle))


def _stopping() -> NotDecoded:
    return NotDecoded(Fault.LOST, "the server is stopping")


class DeviceDecoder:
    """One process for JPEG files, started ahead, and again after it ended.

    Nothing depends on it: what it does not decode is left to the others.
    """

    def __init__(self, setup: asyncio.Future[Setup], device: str) -> None:
        self._setup = setup
        self._device = device
        self._child: Child | None = None
        self._pause = _FIRST_PAUSE
        self._starting: asyncio.Task[None] | None = None

    def start(self) -> asyncio.Task[None]:
        """Start the process in the background."""
        self._starting = asyncio.create_task(self._start(0.0))
        return self._starting

    def takes(self, found: Measured) -> bool:
        """True if it is ready, and decodes this file as Pillow does and sooner."""
        return self._child is not None and found.orientation > 0 and found.area >= _LEAST_PIXELS

    async def take(self) -> Child:
        """The process. Raises NotDecoded if it is not ready."""
        if self._child is None:
            raise NotDecoded(Fault.LOST, "the decoder on the device is not ready")
        return self._child

    async def give_back(self, child: Child) -> None:
        """Its job is done; start it again if it has ended."""
        if child.is_alive:
            child.discard()
        elif self._child is child:
            self._child = None
            await child.close()
            _log.warning("the decoder on the device ended (exit %s); it starts again", child.process.returncode)
            self._starting = asyncio.create_task(self._start(self._pause))
            self._pause = min(_LONGEST_PAUSE, 2 * self._pause)

    async def close(self) -> None:
        child, self._child = self._child, None  # so that none is started in its place
        if self._starting:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        if child:
            await child.close()

    async def _start(self, pause: float) -> None:
        while self._child is None:
            await asyncio.sleep(pause)
            try:
                self._child = await Child.start(self._setup, self._device)
            except NotDecoded as error:
                pause = _LONGEST_PAUSE
                _log.warning("JPEG files are decoded on the CPU: the decoder on the device did not start: %s", error)
            else:
                _log.debug("the decoder on the device started: %d", self._child.process.pid)
