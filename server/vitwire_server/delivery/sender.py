"""A sender: a process in a sandbox that writes rows into clients' memory. UCX's flaws end here.

It maps its staging memory and, for devices, the outbox: it has no token, no key and no memory without rows. It cannot
reach other processes, write files or start programs. For Linux.
"""

import mmap
import os
import select
import socket
import time
import uuid
from contextlib import suppress
from typing import NoReturn

import numpy as np
from msgspec import msgpack

from vitwire.shared.agents import Agent, AgentError, Memory, Transfer
from vitwire_children.confine import May, confine
from vitwire_server.delivery import cuda
from vitwire_server.delivery.messages import (
    MAX_MESSAGE,
    TO_SENDER,
    Add,
    Beat,
    Ended,
    FromSender,
    Outbox,
    Ready,
    Remove,
    Setup,
    ToSender,
    Write,
)

_SHORTEST_PAUSE, _LONGEST_PAUSE = 50e-6, 2e-3
_BEAT_SECONDS = 0.2


def serve(end: int, memory: int, parent: int) -> NoReturn:
    """Serve the socket `end` until it is closed, as a child of process `parent`."""
    with socket.socket(fileno=end) as link:
        setup = TO_SENDER.decode(link.recv(MAX_MESSAGE))
        assert isinstance(setup, Setup), "the first message"
        try:
            # Sharing CUDA memory was only seen within a user.
            confine(parent, May.SEND, other_user=setup.outbox is None)
            sender = _Sender(link, setup, memory)
        except (AgentError, cuda.CudaError, OSError) as error:
            link.sendall(msgpack.encode(Ready(str(error))))
        else:
            link.sendall(msgpack.encode(Ready("")))
            sender.run()
    os._exit(0)


class _Sender:
    def __init__(self, link: socket.socket, setup: Setup, memory: int) -> None:
        """Raises AgentError, CudaError or OSError."""
        self._link = link
        self._map = mmap.mmap(memory, setup.staging_bytes)
        self._staging = Memory(np.frombuffer(self._map, np.uint8).ctypes.data, setup.staging_bytes)
        self._outbox = _mapped(setup.outbox) if setup.outbox else None
        self._agent = Agent(f"vitwire-{uuid.uuid4().hex}")
        for each in filter(None, (self._staging, self._outbox)):
            self._agent.register(each)
        self._faults: dict[str, str] = {}
        """Faults of agents that cannot be written to."""
        self._transfers: dict[int, Transfer] = {}
        self._beat = 0.0

    def run(self) -> None:
        """Until the socket is closed."""
        pause = _SHORTEST_PAUSE
        while True:
            readable, _, _ = select.select([self._link], [], [], pause if self._transfers else None)
            if readable:
                raw = self._link.recv(MAX_MESSAGE)
                if not raw:
                    return
                self._handle(TO_SENDER.decode(raw))
            moved = bool(readable) | self._advance()
            pause = _SHORTEST_PAUSE if moved else min(2 * pause, _LONGEST_PAUSE)

    def _handle(self, message: ToSender) -> None:
        match message:
            case Add():
                try:
                    self._agent.add(message.metadata)
                except AgentError as error:
                    self._faults[message.agent] = str(error)
            case Remove():
                if not self._faults.pop(message.agent, None):
                    with suppress(AgentError):
                        self._agent.remove(message.agent)
            case Write():
                self._write(message)

    def _write(self, message: Write) -> None:
        fault = self._faults.get(message.agent)
        if fault is None:
            source = self._staging if message.device is None else self._outbox
            target = Memory(message.address, message.nbytes, message.device)
            try:
                assert source, "the server sends rows for devices from its outbox"
                part = source.part(message.offset, message.nbytes)
                self._transfers[message.number] = self._agent.write(part, target, message.agent)
            except AgentError as error:
                fault = str(error)
        if fault is not None:
            self._send(Ended(message.number, fault, refused=message.agent in self._faults))

    def _advance(self) -> bool:
        """Report transfers that have ended; returns whether there were any."""
        ended = {}
        for number, transfer in self._transfers.items():
            try:
                if transfer.is_done():
                    ended[number] = ""
            except AgentError as error:
                ended[number] = str(error)
        for number, fault in ended.items():
            with suppress(AgentError):
                self._transfers.pop(number).release()
            self._send(Ended(number, fault))
        if self._transfers and time.monotonic() > self._beat + _BEAT_SECONDS:
            self._beat = time.monotonic()
            self._send(Beat())
        return bool(ended)

    def _send(self, message: FromSender) -> None:
        self._link.sendall(msgpack.encode(message))


def _mapped(outbox: Outbox) -> Memory:
    cuda.make_current(outbox.device)
    return Memory(cuda.mapped(outbox.handle) + outbox.offset, outbox.nbytes, outbox.device)
