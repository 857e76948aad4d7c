"""Transfers to and from the device: CUDA streams, or plain calls on the host. Used on the engine thread."""

import logging
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from vitwire_server.core.errors import Overloaded
from vitwire_server.core.items import DType, Pixels

_log = logging.getLogger(__name__)
TORCH_TYPES: Mapping[DType, torch.dtype] = {each: getattr(torch, each.label) for each in DType}
_ALIGNMENT = 256
# Tensors over received bytes are only read.
warnings.filterwarnings("ignore", message="The given buffer is not writable")


class HostMemory(Protocol):
    """Memory for rows on the host."""

    def allocate(self, nbytes: int) -> memoryview:
        """A block, free again when the last view of it is gone. Raises Overloaded."""
        ...

    def is_kept(self, address: int, nbytes: int) -> bool:
        """Whether bytes at an address lie in the part of it that is pinned."""
        ...


@dataclass(frozen=True, slots=True)
class Download:
    """A transfer of tensors to the host, whose memory may be read after `wait`."""

    rows: Sequence[memoryview]
    """The bytes of each tensor of rows."""
    checks: Sequence[Tensor]
    wait: Callable[[], tuple[float, float]]
    """Blocks until the transfer is done; returns the seconds of computation on the device, and of `preparing` in it."""


def flat(pixels: Pixels) -> Tensor:
    """A flat tensor over the bytes on the host, of their type."""
    return torch.frombuffer(pixels.data, dtype=TORCH_TYPES[pixels.dtype])


class HostStreams:
    """As CudaStreams, for the CPU: calls are synchronous, and nothing is copied unless rows go to another process."""

    depth = 1
    joins = False

    def __init__(self, memory: HostMemory | None = None) -> None:
        """`memory` is where rows go; None leaves them where they were computed."""
        self._memory = memory
        self._started = self._preparing = 0.0

    def upload(self, groups: Sequence[Sequence[Pixels]]) -> list[Tensor]:
        return [flat(pixels) for (pixels,) in groups]

    @contextmanager
    def computing(self) -> Iterator[None]:
        self._started, self._preparing = time.perf_counter(), 0.0
        yield

    @contextmanager
    def preparing(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._preparing = time.perf_counter() - start

    def download(self, rows: Sequence[Tensor], checks: Sequence[Tensor]) -> Download:
        seconds = time.perf_counter() - self._started, self._preparing
        if self._memory:
            placed = [_placed(tensor, self._memory) for tensor in rows]
            for (to, _), tensor in zip(placed, rows, strict=True):
                to.copy_(tensor)
            return Download([data for _, data in placed], checks, lambda: seconds)
        return Download([_bytes(tensor) for tensor in rows], checks, lambda: seconds)


class CudaStreams:
    """Separate streams for upload, computation and download, so that three batches overlap.

    Pinned memory comes from torch's caching host allocator, which reuses a block only after the copies issued on it
    are done. Only `Download.wait` waits for the device.
    """

    depth = 2
    """Maximum batches in flight."""
    joins = True
    """Whether uploaded tensors of one type become one tensor, which later steps handle at once."""

    def __init__(self, device: torch.device, memory: HostMemory | None = None) -> None:
        """`memory` is where rows go; None takes pinned memory of torch's."""
        self._memory = memory
        self.compute = torch.cuda.Stream(device)
        self._device = device
        self._in = torch.cuda.Stream(device)
        self._out = torch.cuda.Stream(device)
        self._started = torch.cuda.Event(enable_timing=True)
        self._copied = torch.cuda.Event(enable_timing=True)
        """The end of the last transfer to the host, and so of its batch."""
        self._preparing: tuple[torch.cuda.Event, torch.cuda.Event] | None = None

    def upload(self, groups: Sequence[Sequence[Pixels]]) -> list[Tensor]:
        """The bytes of each group as a flat tensor on the device, to be read within `computing`.

        The tensors of a group have one type; without `joins` a group is a single tensor. An idle device has nothing to
        overlap the upload with: it then precedes the computation on its stream, which saves waiting for another one.
        """
        ends = [0]
        starts: list[int] = []
        for group in groups:
            starts.append(-(-ends[-1] // _ALIGNMENT) * _ALIGNMENT)
            ends.append(starts[-1] + sum(one.nbytes for one in group))
        sources = [[torch.frombuffer(one.data, dtype=torch.uint8) for one in group] for group in groups]
        stream = self.compute if self._copied.query() else self._in
        with stream:  # also sets the thread's device, to which pinned memory belongs
            memory = self._memory
            if memory and all(memory.is_kept(one.data_ptr(), len(one)) for group in sources for one in group):
                uploaded = torch.empty(ends[-1], dtype=torch.uint8, device=self._device)
                _place(sources, starts, uploaded)  # they stay where they are until the batch is collected
            else:
                pinned = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=True)
                _place(sources, starts, pinned)
                uploaded = pinned.to(self._device, non_blocking=True)
        if stream is not self.compute:
            self.compute.wait_stream(stream)
            uploaded.record_stream(self.compute)
        return [
            uploaded[start:end].view(TORCH_TYPES[group[0].dtype])
            for start, end, group in zip(starts, ends[1:], groups, strict=True)
        ]

    @contextmanager
    def computing(self) -> Iterator[None]:
        """A context in which work is enqueued for computation. Two threads may be in it at once: see `live_capture`."""
        with torch.cuda.stream(self.compute):  # torch 2.10 refuses a stream itself that is entered already
            self._started = torch.cuda.Event(enable_timing=True)
            self._started.record()
            self._preparing = None
            yield

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """A context in which pictures are prepared, within `computing` and at most once in it."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record(self.compute)
        yield
        end.record(self.compute)
        self._preparing = start, end

    def download(self, rows: Sequence[Tensor], checks: Sequence[Tensor]) -> Download:
        """Start the transfer of tensors computed within `computing` to the host; `rows` go to the host memory.

        They are kept until `wait`, as later kernels could be given their memory.
        """
        started, done, copied = (self._started, *(torch.cuda.Event(enable_timing=True) for _ in range(2)))
        preparing = self._preparing
        done.record(self.compute)
        self._out.wait_event(done)
        kept = [*rows, *checks]
        with self._out:
            placed = [_placed(tensor, self._memory) for tensor in rows]
            read = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in checks]
            _copy([*(to for to, _ in placed), *read], kept)
            copied.record(self._out)
        self._copied = copied

        def wait() -> tuple[float, float]:
            copied.synchronize()
            kept.clear()
            return _seconds(started, done), _seconds(*preparing) if preparing else 0.0

        return Download([data for _, data in placed], read, wait)


Streams: TypeAlias = HostStreams | CudaStreams


def _seconds(start: torch.cuda.Event, end: torch.cuda.Event) -> float:
    """Between two events that have passed."""
    return float(start.elapsed_time(end)) / 1000


def _placed(tensor: Tensor, memory: HostMemory | None) -> tuple[Tensor, memoryview]:
    """An empty tensor of the same shape in `memory`, and its bytes; in pinned memory without one, or if it is full."""
    if memory and tensor.numel():
        with suppress(Overloaded):
            block = memory.allocate(tensor.nbytes)
            return torch.frombuffer(block, dtype=tensor.dtype).view(tensor.shape), block
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return pinned, _bytes(pinned)


def _bytes(rows: Tensor) -> memoryview:
    """Rows on the host as bytes, which keep the tensor alive."""
    return rows.view(torch.uint8).numpy().reshape(-1).data


def _place(groups: Sequence[Sequence[Tensor]], starts: Sequence[int], target: Tensor) -> None:
    """Copy each group to its start; from pinned memory to a device without waiting."""
    places: list[Tensor] = []
    for group, start in zip(groups, starts, strict=True):
        sizes = [source.numel() for source in group]
        place = target[start : start + sum(sizes)]
        places += place.split(sizes) if len(sizes) > 1 else [place]
    _copy(places, [source for group in groups for source in group])


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source to its target as one operation of Python.

    After each operation this thread waits for the interpreter, which serves requests meanwhile.
    """
    torch._foreach_copy_(list(targets), list(sources), non_blocking=True)


def pin(memory: memoryview) -> None:
    """Register memory that torch did not allocate with CUDA, for the life of the process.

    Copies to and from a device then need no staging; if it fails, they are slower but right.
    """
    address: int = np.frombuffer(memory, np.uint8).ctypes.data
    error = torch.cuda.cudart().cudaHostRegister(address, len(memory), 0)
    if int(error) != 0:
        with suppress(torch.AcceleratorError):  # else a later operation of torch reports CUDA's last error as its own
            torch.ones(1, device="cuda")
        _log.warning("%d bytes of shared memory could not be pinned: %s", len(memory), error)
