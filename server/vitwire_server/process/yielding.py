"""An event loop that waits while another thread launches a batch."""

import asyncio
from selectors import DefaultSelector, SelectorKey
from threading import Lock

_SECONDS = 0.005
"""How long the loop waits for one launch: an eager forward takes longer, and a driver may hang."""


class YieldingLoop(asyncio.SelectorEventLoop):
    """Runs nothing while `launching` is held, but for at most a moment.

    The engine's thread gives up the interpreter at each operation of torch, and a busy loop that takes it keeps it for
    up to the switch interval: on an H100's host the launch of a replay beside one took 4.5 ms instead of 0.5.
    """

    def __init__(self) -> None:
        self.launching = Lock()
        super().__init__(_Selector(self.launching))


class _Selector(DefaultSelector):
    """Waits for files as the default selector does, and then for the lock."""

    def __init__(self, launching: Lock) -> None:
        super().__init__()
        self._launching = launching
        self._is_patient = True
        """Whether the loop has not waited in vain for this launch."""

    def select(self, timeout: float | None = None) -> list[tuple[SelectorKey, int]]:
        """See DefaultSelector."""
        ready = super().select(timeout)
        if not self._launching.locked():
            self._is_patient = True
        elif self._is_patient:
            self._is_patient = self._launching.acquire(timeout=_SECONDS)
            if self._is_patient:
                self._launching.release()
        return ready
