"""A flag while the engine thread records a forward: slow steps are then worth it if they make replays faster."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_RECORDING = ContextVar("recording", default=False)


@contextmanager
def recording() -> Iterator[None]:
    """A forward is recorded within this context, its warm-ups included."""
    token = _RECORDING.set(True)
    try:
        yield
    finally:
        _RECORDING.reset(token)


def is_recording() -> bool:
    """Whether the calling thread records a forward."""
    return _RECORDING.get()
