"""Memory of the device, read on the engine thread: the driver may block for as long as the device hangs."""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from vitwire_server.observe.metrics.series import Series

_SECONDS = 5.0


class MemoryMetrics:
    """What the device's memory is used for; without a device of its own memory, as on a CPU, there are no series."""

    def __init__(self, series: Series) -> None:
        self._bytes = series.gauge("device_memory_bytes", "Memory of the CUDA device, by kind", "kind")
        self._read: Callable[[], Mapping[str, int]] = dict
        self._due = 0.0

    def reads(self, read: Callable[[], Mapping[str, int]]) -> None:
        """From now on `read` returns the bytes of each kind; it may raise RuntimeError, as for a lost device."""
        self._read = read

    def refresh(self) -> None:
        """Read it if that is due; called on the engine thread between batches."""
        if (now := time.monotonic()) < self._due:
            return
        self._due = now + _SECONDS
        with suppress(RuntimeError):
            for kind, nbytes in self._read().items():
                self._bytes.labels(kind).set(nbytes)
