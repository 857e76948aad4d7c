"""Decoders as the server sees them: their processes, and the memory that each shares with it."""

import asyncio
import fcntl
import logging
import mmap
import os
import sys
from asyncio.subprocess import DEVNULL
from contextlib import suppress
from typing import Self, TypeVar

import msgspec
import numpy as np

from vitwire.wire import Buffer
from vitwire_children import spawn
from vitwire_children.jobs import Child, Program
from vitwire_children.lending import Pool
from vitwire_children.restarts import Restarts
from vitwire_children.serving import Fault, NotDone
from vitwire_server.preparing.files.messages import Decode, Decoded, Measure, Measured, Setup, Sizes
from vitwire_server.preparing.rules.patches import Pixels

_log = logging.getLogger(__name__)
_WORKER = "vitwire_server.preparing.files.worker"
HARDWARE, FILMS = "vitwire_server.preparing.device.hardware", "vitwire_server.preparing.device.films"
"""The modules of decoders on a device: of JPEG files, and of clips."""
OF_HARDWARE = (*spawn.OF_DEVICES, "CUDA_HOME", "TRITON_CACHE_DIR", "CC", "TMPDIR")
"""Variables of decoders on a device."""
_COPIED_BYTES = 4 << 20
"""Bytes that are copied before other RPCs get their turn."""
_KEPT_BYTES, _KEPT_ON_DEVICE_BYTES = 8 << 20, 256 << 20
"""Shared memory that a decoder keeps between two jobs, half of it for each direction: it takes long to get anew."""
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW if sys.platform == "linux" else 0
DEVICE_SECONDS = 5.0
"""Wall-clock time for a JPEG file on the device, which takes milliseconds: it was checked, and its size is bounded."""
_LEAST_PIXELS = 1 << 19
"""Smallest picture for the device: 448² was decoded faster on the CPU, and 1920 x 1080 on the device."""
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0
"""Seconds until the decoder on the device is started again, twice as long each time."""
T = TypeVar("T", Measured, Decoded)


class Decoder(Child):
    """Reads a file from the memory that it shares with the server, and writes pixels into it."""

    sizes: Sizes
    memory: mmap.mmap
    """Begins with the input, and ends with the output."""
    kept_bytes: int

    @classmethod
    async def begin(cls, awaited: asyncio.Future[Setup], device: str = "", module: str = _WORKER) -> Self:
        """A decoder that is ready, of this module. Its process loads its libraries before the setup.

        Raises NotDone if it cannot be started.
        """
        try:
            descriptor = os.memfd_create("vitwire-decoder", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise NotDone(Fault.LOST, f"its process cannot be started: {error}") from error
        kept, stderr = (OF_HARDWARE, DEVNULL) if device else ((), None)
        memory: list[mmap.mmap] = []

        async def set_up() -> Setup:
            setup = await asyncio.shield(awaited)
            nbytes = setup.sizes.input_bytes + setup.sizes.output_bytes
            os.ftruncate(descriptor, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)  # one that was taken over cannot make reads fail
            memory.append(mmap.mmap(descriptor, 0))
            return setup

        try:
            child = await cls.start(Program(module, (descriptor, device), kept, [descriptor], stderr), set_up)
        finally:
            os.close(descriptor)
        child.noun = "decoder on the device" if device else "decoder"
        child.kept_bytes = _KEPT_ON_DEVICE_BYTES if device else _KEPT_BYTES
        child.memory, child.sizes = memory.pop(), awaited.result().sizes
        return child

    async def write(self, data: Buffer) -> None:
        """Bring the bytes of a file into the shared memory. Raises NotDone."""
        source = np.frombuffer(data, np.uint8)
        await _copy(self._shared(len(source), 0), source)

    async def read(self, target: memoryview) -> None:
        """Copy the pixels of the last job. Raises NotDone."""
        array = np.frombuffer(target, np.uint8)
        await _copy(array, self._shared(len(array), self.sizes.input_bytes))

    def _shared(self, count: int, offset: int) -> Pixels:
        if self.memory.closed:
            raise NotDone(Fault.LOST, "its decoder was closed")
        return np.frombuffer(self.memory, np.uint8, count, offset)

    async def do(self, job: Measure | Decode, wall: float, made: type[T]) -> T:
        """The answer to a job, within `wall` seconds. Raises NotDone."""
        answer = await self.ask(job, wall=wall, seconds=job.seconds)
        try:
            return msgspec.convert(answer, made)
        except msgspec.ValidationError as error:
            await self.close()
            raise NotDone(Fault.LOST, "its decoder gave no answer") from error

    async def idle(self) -> None:
        """Wait until the last job is done, and give pages of large files and clips back to the system."""
        await super().idle()
        if self.is_alive and len(self.memory) > self.kept_bytes:
            start = self.sizes.input_bytes // mmap.PAGESIZE * mmap.PAGESIZE
            for begin, end in ((0, start), (start, len(self.memory))):
                keep = self.kept_bytes // 2
                if end - begin > keep:
                    with suppress(OSError):
                        self.memory.madvise(mmap.MADV_REMOVE, begin + keep, end - begin - keep)

    async def close(self) -> None:
        """Kill the process and free the memory."""
        await super().close()
        if hasattr(self, "memory"):
            with suppress(BufferError):  # a copy is under way, whose end frees it; errors in cycles would hold it else
                self.memory.close()


async def _copy(target: Pixels, source: Pixels) -> None:
    for start in range(0, len(source), _COPIED_BYTES):
        target[start : start + _COPIED_BYTES] = source[start : start + _COPIED_BYTES]
        await asyncio.sleep(0)


class DeviceDecoder(Pool[Decoder]):
    """One process for JPEG files, or for clips, started ahead, and again after it ended.

    Nothing depends on it: what it does not decode is left to the others.
    """

    def __init__(self, setup: asyncio.Future[Setup], device: str, module: str) -> None:
        super().__init__(self._none, most=1)
        self._setup = setup
        self._device = device
        self._module = module
        self._running = asyncio.create_task(self._keep_running())
        self.settled = asyncio.Event()
        """Set once it is ready, could not be started, or is closed."""

    def takes(self, found: Measured) -> bool:
        """True if it is ready, and decodes this file as a decoder on the CPU does and sooner."""
        if self._module == FILMS:
            return bool(self._all) and found.film is not None
        return bool(self._all) and found.orientation > 0 and found.area >= _LEAST_PIXELS

    async def close(self) -> None:
        """End the process."""
        self.settled.set()
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)
        await super().close()

    async def _none(self) -> Decoder:
        raise NotDone(Fault.LOST, "the decoder on the device is not ready")

    async def _keep_running(self) -> None:
        restarts = Restarts(_FIRST_PAUSE, _LONGEST_PAUSE)
        while True:
            try:
                child = await Decoder.begin(self._setup, self._device, self._module)
            except NotDone as error:
                _log.warning("%s did not start, so the CPU decodes: %s", self._module.rpartition(".")[2], error)
                self.settled.set()
                await asyncio.sleep(_LONGEST_PAUSE)
                continue
            self._all.add(child)
            self._idle.append(child)
            self.settled.set()
            await child.process.wait()
            if child in self._idle:
                self._idle.remove(child)
                await self._drop(child)
            await asyncio.sleep(restarts.failed())
