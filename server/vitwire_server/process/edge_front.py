"""`--rpc-processes`: edges, which are processes that speak gRPC for the engine in this one."""

import asyncio
import logging
import pickle
import socket
from contextlib import suppress
from dataclasses import dataclass, field, replace

from vitwire_children import spawn
from vitwire_server.config.settings import ServeSettings
from vitwire_server.core.footprints import Footprints
from vitwire_server.core.health import Health
from vitwire_server.core.models import ModelCard
from vitwire_server.observe.metrics.edges import EdgeMetrics
from vitwire_server.observe.metrics.processes import ProcessMetrics
from vitwire_server.process.children import ChildProcess, Launch, StartFailed
from vitwire_server.process.edge import VARIABLE
from vitwire_server.rpc.addresses import PortReservation, raise_if_socket_unusable
from vitwire_server.sessions import messages
from vitwire_server.sessions.arena import ArenaMemory
from vitwire_server.sessions.host import SessionHost, not_ready
from vitwire_server.sessions.link import Link
from vitwire_server.sessions.local import LocalSessions

_log = logging.getLogger(__name__)
_STOP_SECONDS = 5.0
_DRAIN_MARGIN = 5.0
_SERVE_SECONDS = 40.0
"""For edges to serve the model; one that has died serves it once it is restarted."""


@dataclass(slots=True, eq=False)
class _SupervisedEdge:
    """One edge, over all its restarts. The memory it uses is reclaimed only once its process has ended."""

    front: "EdgeFront"
    index: int
    child: ChildProcess = field(init=False)
    serving: asyncio.Event = field(default_factory=asyncio.Event)
    drained: asyncio.Event = field(default_factory=asyncio.Event)
    _pid: int = 0
    _link: Link[messages.ToEngine, messages.ToRpc] | None = None
    _host: SessionHost | None = None
    _connecting: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self.child = ChildProcess(f"rpc-{self.index}", self._launch, self.front.settings)

    def send(self, message: messages.ToRpc) -> None:
        """Send a message to the process, if there is one."""
        if self._link:
            self._link.send(message)

    def serve(self) -> None:
        """The model is loaded."""
        front = self.front
        if front.model and front.sessions and self._link:
            self._host = SessionHost(front.sessions, front.memory, self._link)
            self._link.send(front.model)

    def _launch(self) -> Launch:
        front = self.front
        ours, theirs = socket.socketpair()
        link, arena = descriptors = (theirs.fileno(), front.memory.arena.descriptor)
        return Launch(
            spawn.program("vitwire_server", "edge"),
            {VARIABLE: f"{link},{arena},{self.index}", **front.metrics.environment},
            descriptors,
            release=theirs.close,
            started=lambda pid: self._started(pid, ours),
            ended=lambda: self._ended(ours),
        )

    def _started(self, pid: int, end: socket.socket) -> None:
        self._pid = pid
        self.front.processes.started(self.child.label, pid)
        self._connecting = asyncio.create_task(self._connect(end))

    async def _connect(self, end: socket.socket) -> None:
        front = self.front
        link: Link[messages.ToEngine, messages.ToRpc] = await Link.over(end, messages.FROM_RPC, self._receive)
        self._link = link
        settings = front.settings
        if self.index:  # one process serves the socket: the kernel does not spread the connections of a path
            settings = replace(settings, unix_socket=None)
        link.send(messages.Configure(pickle.dumps(settings), front.port, front.count))
        link.send(front.state())
        self.serve()
        if front.draining:
            link.send(front.draining)

    def _ended(self, end: socket.socket) -> None:
        if self._connecting:
            self._connecting.cancel()
        if self._link:
            self._link.close()
        else:
            end.close()
        if self._host:
            self._host.close()
        self._link = self._host = self._connecting = None
        self.drained.set()
        if self._pid:
            self.front.metrics.edge_ended(self._pid)
            self.front.processes.ended(self.child.label)
            self._pid = 0

    def _receive(self, message: messages.ToEngine) -> None:
        if self._host and isinstance(message, messages.OfSession):
            self._host.receive(message)
            return
        match message:
            case messages.Started():
                if message.fault:
                    self.front.fault = message.fault
                else:
                    self.child.mark_ready()
            case messages.Serving():
                self.serving.set()
            case messages.Drained():
                self.drained.set()
            case _ if reply := not_ready(message):
                self.send(reply)


@dataclass(slots=True)
class EdgeFront:
    """As LocalFront, by edges. Keeps them running, and connects them with the engine."""

    settings: ServeSettings
    health: Health
    memory: ArenaMemory
    metrics: EdgeMetrics
    processes: ProcessMetrics
    count: int
    port: int = 0
    edges: list[_SupervisedEdge] = field(default_factory=list)
    model: messages.Serve | None = None
    """Once the model is loaded."""
    footprints: Footprints | None = None
    sessions: LocalSessions | None = None
    fault: str = ""
    """The reason of an edge that could not listen."""
    draining: messages.Drain | None = None
    """Sent to edges that are started during the drain as well."""
    _running: list[asyncio.Task[bool]] = field(default_factory=list)
    _stopping: asyncio.Event = field(default_factory=asyncio.Event)
    _reservation: PortReservation | None = None
    _beating: asyncio.Task[None] | None = None

    async def start(self) -> int:
        settings = self.settings
        if settings.unix_socket:
            try:
                raise_if_socket_unusable(settings.unix_socket)
            except OSError as error:
                raise OSError(f"cannot listen on {settings.unix_socket}: {error}") from error
        self._reservation = PortReservation(settings.host, settings.port)
        self.port = self._reservation.port
        self.edges += [_SupervisedEdge(self, index) for index in range(self.count)]
        self._beating = asyncio.create_task(self._beat())
        self.processes.expect(edge.child.label for edge in self.edges)
        self._running = [asyncio.create_task(edge.child.keep_running(self._stopping)) for edge in self.edges]
        listening = asyncio.create_task(self._all_listening())
        await asyncio.wait([listening, *self._running], return_when=asyncio.FIRST_COMPLETED)
        if not listening.done():
            listening.cancel()
            await self.stop()
            raise OSError(self.fault or "the processes that speak gRPC cannot be started")
        return self.port

    async def _all_listening(self) -> None:
        for edge in self.edges:
            await edge.child.was_ready.wait()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(messages.BEAT_SECONDS)
            for edge in self.edges:
                edge.send(messages.Beat())

    def serve(self, card: ModelCard, footprints: Footprints, sessions: LocalSessions) -> None:
        self.model = messages.Serve(pickle.dumps((card, footprints)), sessions.digest_seed)
        self.footprints, self.sessions = footprints, sessions
        for edge in self.edges:
            edge.serve()

    async def prepared(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(_SERVE_SECONDS):
                await asyncio.gather(*(edge.serving.wait() for edge in self.edges))

    def describe(self, card: ModelCard) -> None:
        assert self.sessions, "the model is loaded"
        self.model = messages.Serve(pickle.dumps((card, self.footprints)), self.sessions.digest_seed)
        for edge in self.edges:
            edge.send(self.model)

    def state(self) -> messages.Show:
        """The server's state as it is sent."""
        return messages.Show(self.health.state.value, self.health.reason)

    async def show(self) -> None:
        for edge in self.edges:
            edge.send(self.state())

    async def watch(self) -> None:
        done, _ = await asyncio.wait(self._running, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            if error := task.exception():
                _log.error("%s", error, exc_info=None if isinstance(error, StartFailed | OSError) else error)

    async def drain(self, seconds: float) -> None:
        self.draining = messages.Drain(seconds)
        for edge in self.edges:
            edge.drained.clear()
            edge.send(self.draining)
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds + _DRAIN_MARGIN):
                await asyncio.gather(*(edge.drained.wait() for edge in self.edges if edge.child.pid))

    async def stop(self) -> None:
        if self._stopping.is_set():
            return
        self._stopping.set()
        if self._beating:
            self._beating.cancel()
        for edge in self.edges:
            edge.send(messages.Stop())
        if self._running:
            _, alive = await asyncio.wait(self._running, timeout=_STOP_SECONDS)
            for task in alive:
                task.cancel()  # which kills the process
            await asyncio.gather(*self._running, return_exceptions=True)
        if self._reservation:
            self._reservation.close()
        self.metrics.close()
