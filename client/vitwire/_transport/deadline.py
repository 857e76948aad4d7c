"""Deadlines of calls, and the default timeout by the amount of work."""

import math
import time
from collections.abc import Iterable

from vitwire.errors import DeadlineExceeded
from vitwire.items import Item

HEALTH_SECONDS = 10.0
MODEL_SECONDS = 60.0
_BASE_SECONDS, _PATIENT_SECONDS = 60.0, 600.0
_SECONDS_PER_PATCH = 0.025
"""A tower of 600 M parameters takes 1.2 GFLOP per patch: 12 ms on a CPU that does 100 GFLOP/s, 6 ms more to send its
float32 pixels at 1 MB/s. Slower servers need an explicit timeout."""
_VALUES_PER_PATCH = 3 * 14 * 14
_BYTES_PER_PATCH = 32
"""Of a JPEG with good quality: 1.3 bits per pixel."""
_MAX_PATCHES = 1 << 16
"""Default limit of a server for one item."""
_LONGEST_SECONDS = 1e9
"""gRPC overflows on longer deadlines; these become no deadline."""


class Deadline:
    """The deadline of a call, including all its RPCs."""

    def __init__(self, timeout: float | None, default: float) -> None:
        """`default` applies if `timeout` is None; infinity means no deadline. Raises ValueError for NaN."""
        if timeout is not None and math.isnan(timeout):
            raise ValueError("timeout must be a number of seconds, not NaN")
        seconds = float(default if timeout is None else timeout)
        self._is_default = timeout is None
        self._default = default
        self._at = None if seconds > _LONGEST_SECONDS else time.monotonic() + seconds

    def covering(self, items: Iterable[Item], *, patient: bool) -> "Deadline":
        """This deadline if the caller set it; else a new one, from now, by the amount of work.

        patient: allow for a long wait, for a server that is loading or behind requests of higher priority.
        """
        if not self._is_default:
            return self
        base = _PATIENT_SECONDS if patient else _BASE_SECONDS
        return Deadline(None, base + _SECONDS_PER_PATCH * sum(map(patches_of, items)))

    def for_request(self) -> "Deadline":
        """This deadline if the caller set it; else a new one, from now, for one of many requests."""
        return Deadline(None, self._default) if self._is_default else self

    def left_to_wait(self) -> float | None:
        """Seconds that a request may wait for others of its client: those left if the caller set the deadline.

        The default deadline begins with the request, so there is no limit.
        """
        return None if self._is_default else self.left()

    def left(self) -> float | None:
        """Seconds left; None without a deadline. Raises DeadlineExceeded if none are left."""
        if self._at is None:
            return None
        left = self._at - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded("the timeout passed before the server accepted the request")
        return left

    def has(self, seconds: float) -> bool:
        """Whether more than `seconds` are left."""
        return self._at is None or self._at - time.monotonic() > seconds


def patches_of(item: Item) -> int:
    """Patches by the grid, or by the pixels, whichever is more: the grid of tile towers counts tiles.

    Those of a file or picture are a guess: the server chooses the size.
    """
    if item.encoded is not None:
        return min(len(item.encoded) // _BYTES_PER_PATCH, _MAX_PATCHES)
    values = sum(math.prod(tensor.shape) for tensor in (item.pixels, item.crops) if tensor is not None)
    return max(math.prod(item.grid), values // _VALUES_PER_PATCH)
