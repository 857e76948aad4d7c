"""Medians of repeated runs by the device's own clock, until the time of a benchmark is up."""

import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from bench.timing import repeated, seconds_of

from vitwire_server.core.errors import DeviceLost, EncodeFailed
from vitwire_server.towers.files import CheckpointError

Row = dict[str, Any]
_LEAST = 3
"""Repeats of a measurement, whatever they take."""
FAILURES = (
    RuntimeError,
    ImportError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    OSError,
    AssertionError,
    EncodeFailed,
    DeviceLost,
    CheckpointError,
)
"""What one tower may fail with; the others are measured nevertheless."""


class Stopwatch:
    """Measures into rows, and lists what it could not measure."""

    def __init__(self, device: torch.device, *, seconds: float, repeats: int, warm_ups: int) -> None:
        self.left_out: list[str] = []
        self._device = device
        self.warm_ups = warm_ups
        self._repeats = repeats
        self._until = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds until the time is up."""
        return self._until - time.monotonic()

    @property
    def is_over(self) -> bool:
        """Nothing new is to be started."""
        return self.left < 0

    def measure(self, row: Row, column: str, once: Callable[[], float], seconds: float) -> None:
        """Write the median of `once` in milliseconds; null if the time is up or it fails.

        It ends after `seconds` or enough repeats, but not before three.
        """
        where = f"{row['tower']} {row['load']} {column}"
        if self.is_over:
            self.left_out.append(f"{where}: no time")
            return
        try:
            taken = repeated(once, seconds, warm_ups=self.warm_ups, least=_LEAST, most=self._repeats)
        except FAILURES as error:
            self.failed(where, error)
        else:
            row[column] = round(1e3 * median(taken), 3)
            sys.stderr.write(f"{where}: {row[column]} ms\n")

    def failed(self, where: str, error: Exception) -> None:
        """List a failure by the first line of its message. One that loses the device ends the run."""
        if isinstance(error, torch.AcceleratorError | DeviceLost):
            self._until = 0.0
        reason = str(error).partition("\n")[0] or type(error).__name__
        self.left_out.append(f"{where}: {reason}")
        sys.stderr.write(f"left out: {self.left_out[-1]}\n")

    def timed(self, run: Callable[[], object]) -> float:
        """Seconds of a call by the device's clock, with nothing else running."""
        return seconds_of(run, self._device)
