"""The mark of a thread that records a forward: slow steps are then worth it if they make replays faster."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE, CUDAGraph


@dataclass(frozen=True, slots=True)
class _Recording:
    tunes: bool
    beside: list[tuple[torch.cuda.Stream, Tensor]] = field(default_factory=list)
    """Streams that run beside the recorded one, and tensors that they read."""


_RECORDING = ContextVar[_Recording | None]("recording", default=None)


@contextmanager
def recording(*, tunes: bool = False) -> Iterator[None]:
    """A forward is recorded within this context, its warm-ups included; `tunes` if these may take seconds."""
    token = _RECORDING.set(_Recording(tunes))
    try:
        yield
    finally:
        _RECORDING.reset(token)


def is_recording() -> bool:
    """Whether the calling thread records a forward."""
    return _RECORDING.get() is not None


def is_tuning() -> bool:
    """Whether what the calling thread runs for the first time may be timed in several ways."""
    own = _RECORDING.get()
    return own is not None and own.tunes


def read_beside(rows: Tensor, stream: torch.cuda.Stream) -> None:
    """A second stream of the calling thread's recording reads these rows from now on.

    They are kept until `join`, as other kernels could be given their memory.
    """
    if own := _RECORDING.get():
        own.beside.append((stream, rows))


def join() -> None:
    """Let the current stream wait for all that run beside it in the calling thread's recording."""
    own = _RECORDING.get()
    beside = own.beside if own else []
    for stream in {stream.cuda_stream: stream for stream, _ in beside}.values():
        torch.cuda.current_stream(stream.device).wait_stream(stream)
    beside.clear()


@contextmanager
def captured(graph: "CUDAGraph", pool: "_POOL_HANDLE | None" = None) -> Iterator[None]:
    """Within this context, what the current stream is given goes into `graph`; other threads may use the device.

    No garbage is collected meanwhile, as a graph that is freed on this thread would invalidate the capture. Raises
    RuntimeError.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            yield
        finally:
            graph.capture_end()
    finally:
        if collects:
            gc.enable()
