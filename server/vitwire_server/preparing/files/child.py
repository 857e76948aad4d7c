"""One decoder as the server sees it: its process, its socket and the memory that both share."""

import asyncio
import fcntl
import logging
import mmap
import os
import signal
import socket
import sys
from asyncio.subprocess import DEVNULL, Process
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

import numpy as np
from msgspec import msgpack

from vitwire.wire import Buffer
from vitwire_children.confine import warn
from vitwire_server.core.decoding import Fault
from vitwire_server.preparing.files.messages import (
    FROM_DECODER,
    MAX_MESSAGE,
    FromDecoder,
    NotDecoded,
    Ready,
    Refused,
    Setup,
    ToDecoder,
)
from vitwire_server.preparing.rules.patches import Pixels

_log = logging.getLogger(__name__)
_KEPT_VARIABLES = ("PATH", "LANG", "LC_ALL", "HOME", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "LD_LIBRARY_PATH")
_DEVICE_VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_MPS_PIPE_DIRECTORY", "CUDA_HOME", "TRITON_CACHE_DIR", "CC",
    "TMPDIR",
)  # fmt: skip
_WORKER = "vitwire_server.preparing.files.worker"
HARDWARE = "vitwire_server.preparing.device.hardware"
"""The module of decoders on a device."""
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_COPIED_BYTES = 4 << 20
"""Bytes that are copied before other RPCs run."""
_KEPT_BYTES = 8 << 20
"""Shared memory that a decoder keeps between two jobs."""
_FILE_FAULTS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE)
_START_SECONDS = 60.0
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW if sys.platform == "linux" else 0


@dataclass(slots=True, eq=False)
class Child:
    """Does one job at a time. Used on one event loop."""

    process: Process
    _link: socket.socket
    _memory: mmap.mmap
    _setup: Setup
    _asked: ToDecoder
    """The last message."""
    _answer: asyncio.Task[FromDecoder] | None = None
    """To the last message. A separate task, as a caller that is cancelled must not lose the answer."""

    @classmethod
    async def start(cls, awaited: asyncio.Future[Setup], device: str = "") -> Self:
        """A decoder that is ready, on the device if one is named. Its process loads its libraries before the setup.

        Raises NotDecoded if it cannot be started.
        """
        link, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        link.setblocking(False)
        descriptor = os.memfd_create("vitwire-decoder", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            process = await _spawn(other, descriptor, device)
            try:
                setup = await asyncio.shield(awaited)
                memory = _sized(descriptor, setup.sizes.input_bytes + setup.sizes.output_bytes)
            except BaseException:
                await _killed(process)
                link.close()
                raise
        except OSError as error:
            link.close()
            raise NotDecoded(Fault.LOST, f"a decoder cannot be started: {error}") from error
        finally:
            other.close()
            os.close(descriptor)
        child = cls(process, link, memory, setup, setup)
        try:
            answer = await child.ask(setup, _START_SECONDS)
            assert isinstance(answer, Ready)
            if answer.unconfined:
                warn(_log, answer.unconfined)
        except BaseException:
            await child.close()
            raise
        return child

    async def write(self, data: Buffer) -> None:
        """Bring the bytes of a file into the shared memory. Raises NotDecoded."""
        source = np.frombuffer(data, np.uint8)
        await _copy(self._shared(len(source), 0), source)

    async def read(self, target: memoryview) -> None:
        """Copy the pixels of the last job. Raises NotDecoded."""
        array = np.frombuffer(target, np.uint8)
        await _copy(array, self._shared(len(array), self._setup.sizes.input_bytes))

    def _shared(self, count: int, offset: int) -> Pixels:
        if self._memory.closed:
            raise NotDecoded(Fault.LOST, "a decoder was closed")
        return np.frombuffer(self._memory, np.uint8, count, offset)

    async def ask(self, message: ToDecoder, seconds: float) -> FromDecoder:
        """The answer to a message. Raises NotDecoded for a refusal, or without an answer in `seconds` of wall-clock.

        A caller that is cancelled leaves the decoder at work: `idle` waits for it.
        """
        self._asked = message
        self._answer = asyncio.create_task(self._exchange(message, seconds))
        self._answer.add_done_callback(_seen)
        return await asyncio.shield(self._answer)

    async def idle(self) -> None:
        """Wait until the last message was answered, or the decoder has ended."""
        if self._answer and not self._answer.done():  # else another job would start a decoder meanwhile
            await asyncio.wait([self._answer])

    @property
    def is_busy(self) -> bool:
        """True while a message awaits its answer."""
        return self._answer is not None and not self._answer.done()

    async def _exchange(self, message: ToDecoder, seconds: float) -> FromDecoder:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(seconds):
                await loop.sock_sendall(self._link, msgpack.encode(message))
                raw = await loop.sock_recv(self._link, MAX_MESSAGE)
        except TimeoutError:
            await self.close()
            raise NotDecoded(Fault.LOST, f"a decoder did not respond for {seconds:g} s") from None
        except OSError as error:
            raise await self._gone() from error
        if not raw:
            raise await self._gone()
        answer = FROM_DECODER.decode(raw)
        if isinstance(answer, Refused):
            raise NotDecoded(answer.fault, answer.reason)
        return answer

    def discard(self) -> None:
        """Give pages of large files and clips back to the system."""
        if len(self._memory) > _KEPT_BYTES:
            start = self._setup.sizes.input_bytes // mmap.PAGESIZE * mmap.PAGESIZE
            for begin, end in ((0, start), (start, len(self._memory))):
                keep = _KEPT_BYTES // 2
                if end - begin > keep:
                    with suppress(OSError):
                        self._memory.madvise(mmap.MADV_REMOVE, begin + keep, end - begin - keep)

    @property
    def is_alive(self) -> bool:
        """True until the process ends; one that was not reaped yet has closed its socket."""
        if self.process.returncode is not None:
            return False
        try:
            return bool(self._link.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except BlockingIOError:
            return True
        except OSError:
            return False

    async def close(self) -> None:
        """Kill the process and free the memory. Its end of the socket is then closed: a wait for its answer ends."""
        await _killed(self.process)
        self._link.close()
        with suppress(BufferError):  # a copy is under way, whose end frees it; errors in cycles would hold it else
            self._memory.close()

    async def _gone(self) -> NotDecoded:
        await self.close()
        number = -(self.process.returncode or 0)
        if number == signal.SIGPROF and not isinstance(self._asked, Setup):
            return NotDecoded(Fault.TOO_SLOW, f"takes more than {self._asked.seconds:.3g} s to decode")
        if number in _FILE_FAULTS:
            return NotDecoded(Fault.CRASHED, "made the decoder crash")
        return NotDecoded(Fault.LOST, f"the decoder ended unexpectedly (exit {self.process.returncode})")


def _sized(descriptor: int, nbytes: int) -> mmap.mmap:
    """The memory, of at least `nbytes`. Raises OSError."""
    size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    os.ftruncate(descriptor, size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)  # a decoder that was taken over cannot make reads fail
    return mmap.mmap(descriptor, size)


async def _killed(process: Process) -> None:
    """Kill a process unless it has ended.

    Not by `process.kill`, which reaps a process that has just ended, so that asyncio loses its exit status.
    """
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    await process.wait()


async def _copy(target: Pixels, source: Pixels) -> None:
    for start in range(0, len(source), _COPIED_BYTES):
        target[start : start + _COPIED_BYTES] = source[start : start + _COPIED_BYTES]
        await asyncio.sleep(0)


def _seen(answer: asyncio.Task[FromDecoder]) -> None:
    """Mark an error as handled: after a cancellation no task awaits it."""
    if not answer.cancelled():
        answer.exception()


async def _spawn(link: socket.socket, memory: int, device: str) -> Process:
    kept = (*_KEPT_VARIABLES, *_DEVICE_VARIABLES) if device else _KEPT_VARIABLES
    environment = {name: os.environ[name] for name in kept if name in os.environ}
    descriptors = (link.fileno(), memory)
    arguments = (*map(str, descriptors), str(os.getpid()), device)
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",
        "-m",
        HARDWARE if device else _WORKER,
        *arguments,
        stdin=DEVNULL,
        stdout=DEVNULL,
        stderr=DEVNULL if device else None,  # NVIDIA's library writes a line about each broken file
        env=environment | _ONE_THREAD,
        pass_fds=descriptors,
        process_group=0,  # Ctrl-C reaches only the server, which drains first
    )
