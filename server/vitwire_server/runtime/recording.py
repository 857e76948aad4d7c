"""Whether the calling thread records a forward: slow steps are then worth it if they make replays faster."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

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
