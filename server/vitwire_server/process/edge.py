"""An edge: a process that speaks gRPC for the engine of another process. Does not import torch."""

import asyncio
import logging
import os
import pickle
import socket

from vitwire.shared.garbage import exempt_loaded
from vitwire_server.config.settings import ServeSettings, UsageError
from vitwire_server.core.errors import Unavailable
from vitwire_server.core.health import Health, State
from vitwire_server.observe.logs import configure_logs
from vitwire_server.observe.metrics.edges import edge_metrics
from vitwire_server.process.front import LocalFront
from vitwire_server.process.system import STOPPING, raise_limit
from vitwire_server.sessions import messages
from vitwire_server.sessions.arena import Arena
from vitwire_server.sessions.link import Link
from vitwire_server.sessions.remote import RemoteSessions

_log = logging.getLogger(__name__)
_SILENT = "the engine's process does not respond"
_SILENT_SECONDS = 10.0
VARIABLE = "VITWIRE_EDGE"
"""The descriptors of the link and of the arena that this process inherits, and its number."""


async def serve_edge() -> int:
    """Speak gRPC until the engine's process sends Stop; returns the exit code."""
    link, arena, _ = map(int, os.environ.pop(VARIABLE).split(","))
    for number in STOPPING:  # init systems signal all processes; the engine's process drains us
        asyncio.get_running_loop().add_signal_handler(number, lambda: None)
    raise_limit()
    return await _Edge(Arena(arena)).run(socket.socket(fileno=link))


class _Edge:
    """Follows the engine's process. Control messages are handled one after the other, in `run`."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._health = Health()
        self._control: asyncio.Queue[messages.Control | None] = asyncio.Queue()
        self._link: Link[messages.ToRpc, messages.ToEngine]
        self._sessions: RemoteSessions | None = None
        self._preparing: asyncio.Task[None] | None = None
        self._draining: asyncio.Task[None] | None = None
        self._silent = 0.0
        """Seconds without a message of the engine's process, by wake-ups: none while this process is stopped."""
        self._shown = messages.Show(State.STARTING.value, "")
        """The state that the engine's process reported last."""

    async def run(self, end: socket.socket) -> int:
        """See serve_edge."""
        self._link = await Link.over(end, messages.FROM_ENGINE, self._receive)
        losing = asyncio.create_task(self._wait_until_lost())
        watching = asyncio.create_task(self._watch_engine())
        front: LocalFront | None = None
        try:
            while (message := await self._control.get()) and not isinstance(message, messages.Stop):
                if isinstance(message, messages.Configure):
                    front = await self._start(message)
                    if front is None:
                        return 1
                elif front:
                    await self._handle(front, message)
            return int(message is None)
        finally:
            losing.cancel()
            watching.cancel()
            for task in filter(None, (self._preparing, self._draining)):
                task.cancel()
            if front:
                await front.stop()
            self._link.close()

    def _receive(self, message: messages.ToRpc) -> None:
        self._silent = 0.0
        if isinstance(message, messages.Beat):
            return
        if isinstance(message, messages.ToSession):
            if self._sessions:
                self._sessions.receive(message)
        else:
            if isinstance(message, messages.Show):
                self._shown = message
            self._control.put_nowait(message)

    async def _wait_until_lost(self) -> None:
        """End even if the kernel did not end this process with the engine's."""
        await self._link.lost.wait()
        self._control.put_nowait(None)

    async def _watch_engine(self) -> None:
        """While the engine's process does not respond, end RPCs and show this process as failed."""
        while True:
            await asyncio.sleep(messages.BEAT_SECONDS)
            self._silent += messages.BEAT_SECONDS
            failed = self._health.state is State.FAILED
            if self._silent >= _SILENT_SECONDS and not failed and self._sessions:
                _log.error(_SILENT)
                self._control.put_nowait(messages.Show(State.FAILED.value, _SILENT))
                self._sessions.lost(Unavailable(f"the server cannot encode: {_SILENT}"))
            elif failed and self._health.reason == _SILENT and self._silent < _SILENT_SECONDS:
                _log.warning("the engine's process responds again")
                if self._sessions:
                    self._sessions.regained()
                self._control.put_nowait(self._shown)

    async def _start(self, message: messages.Configure) -> LocalFront | None:
        """Listen; None if that is not possible, of which the engine's process is informed."""
        settings: ServeSettings = pickle.loads(message.settings)  # noqa: S301 - from the process that started this one
        configure_logs(settings.log_format, settings.log_level)  # the engine's process adds the label
        fault = ""
        front = None
        try:
            front = LocalFront(settings, edge_metrics(), self._health, processes=message.edges, port=message.port)
            await front.start()
        except (OSError, UsageError) as error:
            fault, front = str(error), None
        self._link.send(messages.Started(fault))
        return front

    async def _handle(self, front: LocalFront, message: messages.Serve | messages.Show | messages.Drain) -> None:
        match message:
            case messages.Serve():
                card, footprints = pickle.loads(message.model)  # noqa: S301 - as above
                if self._sessions:
                    front.describe(card)
                else:
                    exempt_loaded(_log)
                    self._sessions = RemoteSessions(self._link, self._arena, message.digest_seed)
                    front.serve(card, footprints, self._sessions)
                    self._preparing = asyncio.create_task(self._prepare(front))
            case messages.Show():
                self._health.follow(State(message.state), message.reason)
                await front.show()
            case messages.Drain():
                self._draining = asyncio.create_task(self._drain(front, message.seconds))

    async def _prepare(self, front: LocalFront) -> None:
        await front.prepared()
        self._link.send(messages.Serving())

    async def _drain(self, front: LocalFront, seconds: float) -> None:
        await front.drain(seconds)
        self._link.send(messages.Drained())
