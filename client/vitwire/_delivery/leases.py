"""Memory that servers write rows into through NIXL: pools, and leases of their parts.

A lease whose item was not answered is abandoned, never used again: the server may still write there, however late.
"""

import mmap
import os
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from weakref import finalize

import numpy as np
import numpy.typing as npt

from vitwire._inputs.tensors import Tensor
from vitwire.embeddings import STORAGE
from vitwire.errors import EncodeFailed
from vitwire.shared.agents import Agent, AgentError, Memory
from vitwire.shared.regions import Region, Regions, rounded
from vitwire.v1 import encoder_pb2 as pb

if TYPE_CHECKING:
    import torch

_PROGRESS_SECONDS = 0.0005
_BUSY_SECONDS = 0.0001
"""If a call for progress takes longer, bytes are arriving, and more may follow."""
_CLOSE_SECONDS = 2.0
_DEVICE_KEPT_SECONDS = 60.0
"""For which device memory that a server may still write into is kept."""

_ALLOCATOR_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_TORCH_TYPES = {np.dtype(stored).str: name for name, stored in STORAGE.items()}
"""torch's type by numpy's type of the rows."""
_kept: list[object] = []
"""Memory of this process that servers may still write into; only its addresses are taken, not its pages."""


class HostMemory:
    """Memory of the process, which takes pages as they are written."""

    def __init__(self, nbytes: int) -> None:
        self._map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.memory = Memory(np.frombuffer(self._map, np.uint8).ctypes.data, nbytes)

    def rows(
        self, region: Region, shape: tuple[int, ...], dtype: npt.DTypeLike, release: Callable[[], None]
    ) -> npt.NDArray[Any]:
        """An array over a region; `release` is called once it and all its views, which refer to it, are gone."""
        count = int(np.prod(shape))
        array = np.frombuffer(self._map, dtype, count, region.offset)
        finalize(array, release).atexit = False
        return array.reshape(shape)

    def discard(self) -> None:
        """Rows that exist stay valid. What a server may still write reaches nothing else: addresses are not reused."""
        _kept.append(self._map)


class DeviceMemory:
    """Memory of a CUDA device, as torch allocates it."""

    def __init__(self, nbytes: int, device: str) -> None:
        """Raises AgentError."""
        try:
            import torch  # noqa: PLC0415  # not a dependency of the client
        except ImportError:
            raise AgentError(f"device={device!r} needs torch, which is not installed") from None
        if any("expandable_segments:true" in os.environ.get(name, "").lower() for name in _ALLOCATOR_SETTINGS):
            raise AgentError(f"device={device!r} does not work with expandable_segments of torch's allocator")
        try:
            self._tensor = torch.empty(nbytes, dtype=torch.uint8, device=device)
        except RuntimeError as error:
            raise AgentError(f"no memory on device={device!r}: {str(error).partition(chr(10))[0]}") from None
        self._torch = torch
        self._released: deque[tuple[Callable[[], None], torch.cuda.Event]] = deque()
        self.memory = Memory(self._tensor.data_ptr(), nbytes, self._tensor.device.index)

    def rows(
        self, region: Region, shape: tuple[int, ...], dtype: npt.DTypeLike, release: Callable[[], None]
    ) -> "torch.Tensor":
        """As of `HostMemory`. The region is released once the work that was enqueued before is done."""
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        held = _DeviceRange(self.memory.part(region.offset, nbytes))
        finalize(held, self._enqueue, release).atexit = False
        flat = self._torch.as_tensor(held, device=self._tensor.device)
        return flat.view(getattr(self._torch, _TORCH_TYPES[np.dtype(dtype).str])).view(shape)

    def discard(self) -> None:
        """As of `HostMemory`, but the memory is freed after a time."""
        until = time.monotonic() + _DEVICE_KEPT_SECONDS
        _kept[:] = [each for each in _kept if not isinstance(each, tuple) or each[0] > time.monotonic()]
        _kept.append((until, self._tensor))

    def collect(self) -> None:
        """Release regions whose last work is done."""
        while self._released and self._released[0][1].query():
            self._released.popleft()[0]()

    def _enqueue(self, release: Callable[[], None]) -> None:
        event = self._torch.cuda.Event()
        event.record(self._torch.cuda.current_stream(self._tensor.device))
        self._released.append((release, event))


class _DeviceRange:
    """A range of device memory that tensors are made of, and which their storage keeps alive."""

    def __init__(self, memory: Memory) -> None:
        self.__cuda_array_interface__ = {
            "data": (memory.address, False),
            "shape": (memory.nbytes,),
            "typestr": "|u1",
            "version": 3,
        }


class Lease:
    """A region for the rows of one item. Ends by `rows`, `release` or `abandon`, of which the first counts."""

    def __init__(self, pool: "Pool", region: Region) -> None:
        self._pool = pool
        self._open = True
        self.region = region

    def rows(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Tensor:
        """The rows that the server wrote; the region is free again when they and all their views are gone."""
        if self._ended():
            return self._pool.memory.rows(self.region, shape, dtype, lambda: self._pool.free(self.region))
        raise RuntimeError("the lease has ended")

    def release(self) -> None:
        """The server will not write any more."""
        if self._ended():
            self._pool.free(self.region)

    def abandon(self) -> None:
        """The server may still write."""
        self._ended(abandoned=self.region.nbytes)

    def _ended(self, abandoned: int = 0) -> bool:
        was_open, self._open = self._open, False
        if was_open:
            self._pool.ended(abandoned)
        return was_open


class Pool:
    """Registered memory and the agent that it belongs to. Thread-safe."""

    def __init__(self, nbytes: int, device: str | None) -> None:
        """Raises AgentError."""
        self.memory: HostMemory | DeviceMemory = DeviceMemory(nbytes, device) if device else HostMemory(nbytes)
        self.abandoned = 0
        """Bytes of abandoned leases."""
        self._regions = Regions(nbytes)
        self._freed: deque[Region] = deque()
        """By finalisers, which may run anywhere and so take no lock."""
        self._agent: Agent | None = Agent(uuid.uuid4().hex)
        self._agent.register(self.memory.memory)
        kind = pb.MEMORY_KIND_DEVICE if device else pb.MEMORY_KIND_HOST
        self.delivery = pb.Delivery(
            agent=self._agent.name,
            agent_metadata=self._agent.metadata,
            memory=kind,
            device=self.memory.memory.device or 0,
            address=self.memory.memory.address,
            bytes=nbytes,
        )
        self._unanswered = 0
        self._retired = self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._progress, name="vitwire-nixl", daemon=True)
        self._thread.start()

    @property
    def size(self) -> int:
        """Bytes of the pool."""
        return self._regions.size

    def check_fits(self, sizes: Sequence[int]) -> None:
        """Raises EncodeFailed if the pool cannot hold the rows of one request at a time."""
        if sum(map(rounded, sizes)) > self.size:
            raise EncodeFailed(
                f"delivery='nixl': a request's embeddings need {sum(sizes)} bytes, but delivery_bytes is {self.size}",
                code="RESOURCE_EXHAUSTED",
            )

    def lease(self, nbytes: int) -> Lease | None:
        """A lease of `nbytes`; None without room, or if the pool is retired."""
        with self._changed:
            if self._retired:  # the agent may be closed, and the memory without a keeper
                return None
            if isinstance(self.memory, DeviceMemory):
                self.memory.collect()
            while self._freed:
                self._regions.give_back(self._freed.popleft())
            region = self._regions.take(nbytes)
            if region is None:
                return None
            self._unanswered += 1
            self._changed.notify()
        return Lease(self, region)

    def free(self, region: Region) -> None:
        """The region may be leased again."""
        self._freed.append(region)

    def ended(self, abandoned: int) -> None:
        """A lease has ended; `abandoned` bytes must not be used again."""
        with self._changed:
            self._unanswered -= 1
            self.abandoned += abandoned
            self._changed.notify()

    @property
    def is_retired(self) -> bool:
        """Whether nothing can be leased any more."""
        return self._retired

    def retire(self) -> None:
        """Lease no more. The agent is closed with the last lease; rows stay valid."""
        with self._changed:
            self._retired = True
            self._changed.notify()

    def close(self) -> None:
        """Close the agent now; rows stay valid."""
        with self._changed:
            self._retired = self._closed = True
            self._changed.notify()
        self._thread.join(_CLOSE_SECONDS)

    def _progress(self) -> None:
        """Connections, and writes over TCP, need the help of this process while rows may arrive."""
        agent = self._agent
        assert agent, "closed by this thread only"
        while not self._retired or (self._unanswered and not self._closed):
            with self._changed:
                while not self._unanswered and not self._retired:
                    self._changed.wait()
            start = time.perf_counter()
            with suppress(AgentError):  # the server's transfer fails, and its rows come another way
                agent.progress()
            if time.perf_counter() - start < _BUSY_SECONDS:
                time.sleep(_PROGRESS_SECONDS)
        agent.close()
        self._agent = None
        if self.abandoned or self._unanswered:
            self.memory.discard()
