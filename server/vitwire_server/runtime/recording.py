"""The mark of a thread that records a forward: slow steps are then worth it if they make replays faster."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE, CUDAGraph

_RECORDING = ContextVar[list[tuple[torch.cuda.Stream, Tensor]] | None]("recording", default=None)
"""Streams that run beside the recorded one, and tensors that they read."""


@contextmanager
def recording() -> Iterator[None]:
    """A forward is recorded within this context, its warm-ups included."""
    token = _RECORDING.set([])
    try:
        yield
    finally:
        _RECORDING.reset(token)


def is_recording() -> bool:
    """Whether the calling thread records a forward."""
    return _RECORDING.get() is not None


def read_beside(rows: Tensor, stream: torch.cuda.Stream) -> None:
    """A second stream of the calling thread's recording reads these rows from now on.

    They are kept until `join`, as other kernels could be given their memory.
    """
    if (beside := _RECORDING.get()) is not None:
        beside.append((stream, rows))


def join() -> None:
    """Let the current stream wait for all that run beside it in the calling thread's recording."""
    beside = _RECORDING.get() or []
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
