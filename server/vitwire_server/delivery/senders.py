"""The delivery processes of a server: a factory, and the senders that it forks. Used by the delivery thread only."""

import logging
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from selectors import EVENT_READ, DefaultSelector
from socket import send_fds
from weakref import finalize

from msgspec import msgpack

from vitwire.shared.agents import AgentError
from vitwire_children import spawn
from vitwire_children.restarts import Restarts
from vitwire_server.delivery.messages import (
    FROM_SENDER,
    MAX_MESSAGE,
    End,
    Fork,
    FromSender,
    Outbox,
    Ready,
    Setup,
    ToSender,
)
from vitwire_server.delivery.staging import Staging

_log = logging.getLogger(__name__)
_START_SECONDS = 30.0
_MOST_MESSAGES = 256
"""Read from a sender before others run."""
_KEPT_VARIABLES = (
    *spawn.OF_DEVICES,
    *("UCX_NET_DEVICES", "UCX_IB_GID_INDEX", "UCX_IB_SL", "UCX_IB_TRAFFIC_CLASS", "UCX_TCP_PORT_RANGE"),
)
TRANSPORTS = "tcp,rc,cuda_copy,cuda_ipc"
"""UCX's transports that name no process and no file of this host in a remote key."""
_SET_VARIABLES = {
    "UCX_TLS": TRANSPORTS,
    "UCX_MEM_MMAP_HOOK_MODE": "none",  # hooks take 0.4 s to install, and senders register what they send
    "UCX_LOG_LEVEL": "fatal",
    "NIXL_LOG_LEVEL": "FATAL",
    "HOME": "/",
}


@dataclass(slots=True, eq=False)
class Sender:
    """A delivery process as the server sees it."""

    number: int
    link: socket.socket
    staging: Staging
    agents: set[str] = field(default_factory=set)
    """Names of agents that were added."""
    is_ready: bool = False
    is_gone: bool = False
    heard: float = field(default_factory=time.monotonic)
    when_ended: Callable[[], None] | None = None
    """Set once it was killed: called when it has ended."""

    def send(self, message: ToSender) -> bool:
        """Send a message; False if the sender is busy or gone."""
        try:
            self.link.send(msgpack.encode(message))
        except OSError:
            return False
        return True

    def received(self) -> list[FromSender] | None:
        """Messages of the sender; None if it is gone."""
        messages: list[FromSender] = []
        with suppress(BlockingIOError):
            while len(messages) < _MOST_MESSAGES:
                try:
                    raw = self.link.recv(MAX_MESSAGE)
                    if not raw:
                        return None
                    messages.append(FROM_SENDER.decode(raw))
                except (ConnectionError, ValueError, RecursionError):  # the latter two from decoding
                    return None
        self.heard = time.monotonic()
        return messages


class Senders:
    """Starts senders ahead, and notices what they send and when they end."""

    def __init__(self, staging_bytes: int) -> None:
        self._staging_bytes = staging_bytes
        self._outbox: Outbox | None = None
        self._selector = DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        finalize(self, os.close, self._wake)
        self._selector.register(self._wake, EVENT_READ)
        self._process: subprocess.Popen[bytes] | None = None
        self._link: socket.socket | None = None
        self._spares: list[Sender] = []
        self._started = 0
        self._restarts = Restarts()

    @property
    def is_running(self) -> bool:
        """Whether the factory runs; its socket is closed before its senders end with it."""
        return self._link is not None and spawn.is_open(self._link)

    def start(self, outbox: Outbox | None = None) -> None:
        """Wait until a sender can be taken. Raises AgentError."""
        before, self._outbox = self._outbox, outbox
        for spare in list(self._spares):
            self.end(spare)
        try:
            self._fork()
            deadline = time.monotonic() + _START_SECONDS
            while not any(each.is_ready for each in self._spares):
                if time.monotonic() > deadline:
                    raise AgentError("the sender does not start")
                for sender, messages in self.wait(0.1):
                    self.started(sender, messages)
        except AgentError:
            self._outbox = before
            raise

    def started(self, sender: Sender, messages: list[FromSender] | None) -> None:
        """A spare has reported. Raises AgentError if it cannot start."""
        fault = "it ended"
        for message in messages or []:
            if isinstance(message, Ready):
                fault = message.fault
        if not fault:
            sender.is_ready = True
        else:
            self.end(sender)
            self._restarts.failed()
            raise AgentError(f"the sender cannot start: {fault}")

    def is_spare(self, sender: Sender) -> bool:
        """Whether it was not taken."""
        return sender in self._spares

    def keep(self, count: int) -> None:
        """Start spares until there are `count`, in place of those that hang."""
        late = time.monotonic() - _START_SECONDS
        for spare in [each for each in self._spares if not each.is_ready and each.heard < late]:
            _log.warning("a sender does not start and is replaced")
            self.end(spare)
        while len(self._spares) < count and self._restarts.is_over:
            try:
                self._fork()
            except AgentError as error:
                self._restarts.failed()
                _log.warning("%s", error)

    def take(self) -> Sender | None:
        """A sender that is ready; None if there is none yet."""
        for sender in self._spares:
            if sender.is_ready:
                self._spares.remove(sender)
                return sender
        return None

    def end(self, sender: Sender, when_ended: Callable[[], None] = lambda: None) -> None:
        """Kill a sender, unless it was. `when_ended` is called once it does not read the server's memory any more."""
        if sender in self._spares:
            self._spares.remove(sender)
        self._kill(sender)
        sender.when_ended = when_ended

    def _kill(self, sender: Sender) -> None:
        if not sender.is_gone and self._link:
            with suppress(OSError):  # the factory has ended, and its children end with it
                self._link.send(msgpack.encode(End(sender.number)))

    def wake(self) -> None:
        """End a wait. Called by any thread."""
        os.eventfd_write(self._wake, 1)

    def wait(self, seconds: float | None) -> Iterator[tuple[Sender, list[FromSender] | None]]:
        """Senders that sent something, or are gone; waits for one, or for `wake`."""
        for key, _ in self._selector.select(seconds):
            if not isinstance(key.data, Sender):
                with suppress(BlockingIOError):
                    os.eventfd_read(self._wake)
                continue
            sender, messages = key.data, key.data.received()
            if messages is None:
                self._kill(sender)  # one that was taken over may live on
                sender.is_gone = True
                self._selector.unregister(sender.link)
                sender.link.close()
                sender.staging.close()
            if sender.when_ended is None:
                yield sender, messages
            elif messages is None:
                sender.when_ended()

    def close(self) -> None:
        """End the factory, and with it all senders."""
        self._end_factory()
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, Sender):
                key.data.link.close()
                key.data.staging.close()
        self._selector.close()

    def _fork(self) -> None:
        """Start a sender. Raises AgentError."""
        link = self._factory()
        self._started += 1
        try:
            with spawn.connected(socket.SOCK_SEQPACKET) as (ours, theirs):
                sender = Sender(self._started, ours, Staging(self._staging_bytes))
                fork = msgpack.encode(Fork(sender.number))
                send_fds(link, [fork], [theirs.fileno(), sender.staging.descriptor])
        except OSError as error:
            self._end_factory()
            raise AgentError(f"a sender cannot be started: {error}") from error
        sender.send(Setup(self._staging_bytes, self._outbox))
        self._selector.register(ours, EVENT_READ, sender)
        self._spares.append(sender)

    def _factory(self) -> socket.socket:
        """The socket of the factory, which is started if there is none. Raises AgentError."""
        if self._link and self.is_running:
            return self._link
        self._end_factory()
        try:
            with spawn.connected(socket.SOCK_SEQPACKET) as (ours, theirs):
                options = spawn.options(spawn.environment(*_KEPT_VARIABLES) | _SET_VARIABLES, [theirs.fileno()])
                command = spawn.program("vitwire_server.delivery.factory", theirs.fileno())
                self._process = subprocess.Popen(command, **options)  # noqa: S603 - this package
        except (OSError, subprocess.SubprocessError) as error:
            raise AgentError(f"the sender cannot be started: {error}") from error
        self._link = ours
        return ours

    def _end_factory(self) -> None:
        if self._process:
            self._process.kill()
            self._process.wait()
        if self._link:
            self._link.close()
        self._process = self._link = None
