"""What keeps a server's health true: its engine's thread, and who watches it."""

import asyncio
import logging
from contextlib import suppress
from threading import Thread

from vitwire.allocator import trim
from vitwire_server.core.health import Health, State
from vitwire_server.rpc.server import RpcServer
from vitwire_server.scheduling.scheduler import Scheduler

_log = logging.getLogger(__name__)
_IDLE_SECONDS = 10.0
_WATCH_SECONDS = 1.0


class EngineThread(Thread):
    """Runs the scheduler; tells the loop when it ended, and whether it failed."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(name="engine", daemon=True)
        self._scheduler = scheduler
        self._loop = asyncio.get_running_loop()
        self.ended = asyncio.Event()
        self.failed = True

    def run(self) -> None:
        """Called by Thread.start."""
        try:
            self._scheduler.run()
            self.failed = False
        except Exception:  # noqa: BLE001 - the engine's loop: whatever it was, the process must end
            _log.exception("the engine stopped")
        finally:
            with suppress(RuntimeError):  # the loop is closed: the process is about to exit
                self._loop.call_soon_threadsafe(self.ended.set)


class Life:
    """Changes a server's state, and what probes see with it. Used on the event loop, but for `warm`."""

    def __init__(self, health: Health, rpc: RpcServer) -> None:
        self._health = health
        self._rpc = rpc
        self._loop = asyncio.get_running_loop()

    async def become(self, state: State, reason: str = "") -> None:
        """Change the state. Raises ValueError where that cannot be."""
        self._health.become(state, reason)
        await self._rpc.set_ready(ready=self._health.is_ready)
        await self._rpc.set_alive(alive=self._health.is_alive)

    def warm(self) -> None:
        """The model was read; called by the thread that loads. Probes see no difference."""
        with suppress(RuntimeError):  # the loop is closed: the process is about to exit
            self._loop.call_soon_threadsafe(self._warm)

    def _warm(self) -> None:
        if self._health.state is State.STARTING:
            self._health.become(State.WARMING)

    async def drain(self) -> None:
        """No longer ready. A server that failed stays so."""
        if self._health.is_alive:
            await self.become(State.DRAINING)

    async def end(self) -> None:
        """Close the ports."""
        await self._rpc.stop(0)

    async def watch(self, scheduler: Scheduler, wedge_seconds: float) -> None:
        """The state follows the engine: it fails while it hangs, or cannot encode what it could.

        Freed memory goes back to the system when nothing ran for a while.
        """
        trimmed_at = 0.0
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            silence = scheduler.silence()
            hangs = f"no progress for {silence:.0f} s beyond the time its batch should take"
            await self._follow(hangs if silence > wedge_seconds else scheduler.ailment)
            now = scheduler.now()
            if trimmed_at <= scheduler.last_launch < now - _IDLE_SECONDS:
                trimmed_at = now
                trim()

    async def _follow(self, reason: str) -> None:
        if reason and self._health.is_alive:
            _log.error("engine failed: %s", reason)
            await self.become(State.FAILED, reason)
        elif not reason and not self._health.is_alive:
            _log.warning("engine recovered")
            await self.become(State.SERVING)
