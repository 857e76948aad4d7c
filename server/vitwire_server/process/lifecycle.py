"""The engine thread, and the server's state: what probes see follows the engine."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Thread

from vitwire.shared.allocator import trim
from vitwire_server.core.health import Health, State
from vitwire_server.scheduling.scheduler import Scheduler

_log = logging.getLogger(__name__)
_IDLE_SECONDS = 10.0
_WATCH_SECONDS = 1.0


class EngineThread(Thread):
    """Runs the scheduler; sets `ended` on the event loop when it ends, and `failed`."""

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
        except Exception:  # noqa: BLE001 - the engine's loop: after any error the process must end
            _log.exception("the engine stopped")
        finally:
            with suppress(RuntimeError):  # the loop is closed: the process is about to exit
                self._loop.call_soon_threadsafe(self.ended.set)


@dataclass(frozen=True, slots=True)
class Lifecycle:
    """Changes the server's state and with it the health service; event loop only, but for `_threadsafe` methods."""

    health: Health
    show: Callable[[], Awaitable[None]]
    """Lets probes see the state."""
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)

    async def set_state(self, state: State, reason: str = "") -> None:
        """Change the state. Raises ValueError if the current state does not allow it."""
        self.health.change(state, reason)
        await self.show()

    def weights_loaded_threadsafe(self) -> None:
        """Go from STARTING to WARMING; called on the loading thread. Probes see no difference."""
        with suppress(RuntimeError):  # the loop is closed: the process is about to exit
            self._loop.call_soon_threadsafe(self._weights_loaded)

    def _weights_loaded(self) -> None:
        if self.health.state is State.STARTING:
            self.health.change(State.WARMING)

    async def start_draining(self) -> None:
        """Turn readiness off. A failed server stays FAILED."""
        if self.health.is_alive:
            await self.set_state(State.DRAINING)

    async def watch_engine(self, scheduler: Scheduler, wedge_seconds: float) -> None:
        """Set FAILED while the engine hangs or cannot encode, and SERVING when it recovers.

        After a while without work, freed memory is returned to the system.
        """
        trimmed_at = 0.0
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            silence = scheduler.watchdog.silence()
            hung = f"no progress for {silence:.0f} s beyond the time its batch should take"
            await self._follow_engine(hung if silence > wedge_seconds else scheduler.fault)
            now = scheduler.intake.now()
            if trimmed_at <= scheduler.last_launch < now - _IDLE_SECONDS:
                trimmed_at = now
                trim()

    async def _follow_engine(self, fault: str) -> None:
        if fault and self.health.is_alive:
            _log.error("engine failed: %s", fault)
            await self.set_state(State.FAILED, fault)
        elif not fault and not self.health.is_alive:
            _log.warning("engine recovered")
            await self.set_state(State.SERVING)
