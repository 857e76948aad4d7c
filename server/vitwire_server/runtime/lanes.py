"""How bytes get to the device and rows come back: on the host at once, on CUDA on streams of their own."""

import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from vitwire_server.core.items import DType, Pixels

TORCH_TYPES = {
    DType.FLOAT32: torch.float32,
    DType.FLOAT16: torch.float16,
    DType.BFLOAT16: torch.bfloat16,
    DType.UINT8: torch.uint8,
}
_ALIGNMENT = 256
# Received bytes are only read, never written through the tensor that views them.
warnings.filterwarnings("ignore", message="The given buffer is not writable")


@dataclass(frozen=True, slots=True)
class Landing:
    """Tensors on their way to the host."""

    tensors: Sequence[Tensor]
    wait: Callable[[], float]
    """Blocks until they are there; returns the seconds that the device computed."""


class Lanes(ABC):
    """The ways in and out of a device, and the one it computes on."""

    depth: int
    """Batches that may be under way at once."""

    @abstractmethod
    def upload(self, pixels: Sequence[Pixels]) -> list[Tensor]:
        """The items' bytes as flat tensors on the device; to be read within `computing`."""

    @abstractmethod
    def computing(self) -> AbstractContextManager[None]:
        """A context in which work goes to the lane that computes."""

    @abstractmethod
    def download(self, tensors: Sequence[Tensor]) -> Landing:
        """Start bringing tensors that were computed within `computing` to the host."""


def flat(pixels: Pixels) -> Tensor:
    """The bytes of a tensor on the host, viewed as flat elements of its type."""
    return torch.frombuffer(pixels.data, dtype=TORCH_TYPES[pixels.dtype])


class HostLanes(Lanes):
    """The device is the host: nothing is copied, everything happens at once."""

    depth = 1

    def __init__(self) -> None:
        self._started = 0.0

    def upload(self, pixels: Sequence[Pixels]) -> list[Tensor]:
        return [flat(one) for one in pixels]

    @contextmanager
    def computing(self) -> Iterator[None]:
        self._started = time.perf_counter()
        yield

    def download(self, tensors: Sequence[Tensor]) -> Landing:
        seconds = time.perf_counter() - self._started
        return Landing(tensors, lambda: seconds)


class CudaLanes(Lanes):
    """One stream in, one that computes, one out; batch N+1 comes in while N runs and N-1 leaves.

    Pinned memory comes from torch's caching host allocator, which gives a block away again only
    after the copies that were issued on it are done. Nothing here waits for the device but
    `Landing.wait`.
    """

    depth = 2

    def __init__(self, device: torch.device) -> None:
        self.compute = torch.cuda.Stream(device)
        self._device = device
        self._in = torch.cuda.Stream(device)
        self._out = torch.cuda.Stream(device)
        self._started = torch.cuda.Event(enable_timing=True)

    def upload(self, pixels: Sequence[Pixels]) -> list[Tensor]:
        offsets = [0]
        for one in pixels:
            offsets.append(offsets[-1] + -(-one.nbytes // _ALIGNMENT) * _ALIGNMENT)
        with torch.cuda.stream(self._in):  # also makes this device the thread's, which pinned memory belongs to
            pinned = torch.empty(offsets[-1], dtype=torch.uint8, pin_memory=True)
            for start, one in zip(offsets, pixels, strict=False):
                pinned[start : start + one.nbytes].copy_(torch.frombuffer(one.data, dtype=torch.uint8))
            there = pinned.to(self._device, non_blocking=True)
        self.compute.wait_stream(self._in)
        there.record_stream(self.compute)
        return [
            there[start : start + one.nbytes].view(TORCH_TYPES[one.dtype])
            for start, one in zip(offsets, pixels, strict=False)
        ]

    @contextmanager
    def computing(self) -> Iterator[None]:
        with torch.cuda.stream(self.compute):
            self._started = torch.cuda.Event(enable_timing=True)
            self._started.record()
            yield

    def download(self, tensors: Sequence[Tensor]) -> Landing:
        started, done, landed = (self._started, *(torch.cuda.Event(enable_timing=True) for _ in range(2)))
        done.record(self.compute)
        self._out.wait_event(done)
        with torch.cuda.stream(self._out):
            host = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
            for target, tensor in zip(host, tensors, strict=True):
                target.copy_(tensor, non_blocking=True)
                tensor.record_stream(self._out)
            landed.record(self._out)

        def wait() -> float:
            landed.synchronize()
            return float(started.elapsed_time(done)) / 1000

        return Landing(host, wait)
