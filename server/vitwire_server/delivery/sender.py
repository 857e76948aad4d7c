"""A sender: a process in a sandbox that writes rows into clients' memory. UCX's flaws end here.

It maps its staging memory and, for devices, the outbox: it has no token, no key and no memory without rows. It cannot
reach other processes, write files or start programs. For Linux. The filter of system calls holds whatever the process's
user and capabilities are.
"""

import ctypes
import errno
import mmap
import os
import platform
import resource
import select
import signal
import socket
import struct
import time
import uuid
from contextlib import suppress
from typing import NoReturn

import numpy as np
from msgspec import msgpack

from vitwire.shared.agents import Agent, AgentError, Memory, Transfer
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
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
_FILTER = 2
"""SECCOMP_MODE_FILTER."""
_CAPABILITIES = 0x20080522
"""_LINUX_CAPABILITY_VERSION_3."""
_NOBODY = 65534
_FORBIDDEN = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
    "execve": (59, 221),
    "execveat": (322, 281),
}
"""Numbers of system calls on x86-64 and ARM."""
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""By machine: its column in _FORBIDDEN and its AUDIT_ARCH."""
_X32 = 0x40000000
_LOAD, _IF_EQUAL, _IF_AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_NUMBER_AT, _MACHINE_AT = 0, 4
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x80000000


def serve(end: int, memory: int, parent: int) -> NoReturn:
    """Serve the socket `end` until it is closed, as a child of process `parent`."""
    with socket.socket(fileno=end) as link:
        setup = TO_SENDER.decode(link.recv(MAX_MESSAGE))
        assert isinstance(setup, Setup), "the first message"
        try:
            # Sharing CUDA memory was only seen within a user.
            confine(parent, other_user=setup.outbox is None)
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
        """Of agents that cannot be written to."""
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


def confine(parent: int, *, other_user: bool) -> None:
    """Confine this process, which ends with process `parent`. Raises OSError.

    With `other_user`, a process of root goes on as nobody; sharing CUDA memory was only seen within a user.
    """
    os.chdir("/")
    for limit in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE):
        resource.setrlimit(limit, (0, 0))
    if other_user and os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    libc = ctypes.CDLL(None, use_errno=True)
    header, none = struct.pack("=Ii", _CAPABILITIES, 0), bytes(24)
    _checked(libc.capset(header, none))
    _checked(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    _checked(libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0))
    _refuse_calls(libc)
    dies_with(parent)  # which a change of user would forget


def dies_with(parent: int) -> None:
    """End this process with the thread of process `parent` that started it. Raises OSError."""
    _checked(ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0))
    if os.getppid() != parent:  # it ended before
        os._exit(1)


def _refuse_calls(libc: ctypes.CDLL) -> None:
    if platform.machine() not in _MACHINES:
        raise OSError(errno.ENOSYS, f"no sandbox for {platform.machine()}")
    column, machine = _MACHINES[platform.machine()]
    numbers = [each[column] for each in _FORBIDDEN.values()]
    program = [(_LOAD, 0, 0, _MACHINE_AT), (_IF_EQUAL, 1, 0, machine), (_RETURN, 0, 0, _KILL)]
    program += [(_LOAD, 0, 0, _NUMBER_AT), (_IF_AT_LEAST, len(numbers) + 1, 0, _X32)]
    program += [(_IF_EQUAL, len(numbers) - at, 0, number) for at, number in enumerate(numbers)]
    program += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _REFUSE)]
    filters = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *each) for each in program))
    described = struct.pack("@HP", len(program), ctypes.addressof(filters))
    _checked(libc.prctl(_PR_SET_SECCOMP, _FILTER, described, 0, 0))


def _checked(result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
