"""The mark of a thread that records a forward: slow steps are then worth it if they make replays faster."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE, CUDAGraph

_RECORDING = ContextVar[list[Tensor] | None]("recording", default=None)


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


def read_beside() -> list[Tensor]:
    """Tensors of the calling thread's recording that a second stream still reads; none of one that failed."""
    kept = _RECORDING.get()
    return [] if kept is None else kept


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
