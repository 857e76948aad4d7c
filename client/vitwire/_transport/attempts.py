"""The attempts of an RPC: deadlines, when to send it again, and how long to wait for a silent server."""

import math
import random
import time
from collections.abc import Iterable
from typing import NamedTuple

from vitwire.errors import DeadlineExceeded, Overloaded, Unavailable, VitwireError
from vitwire.items import Item

HEALTH_SECONDS = 10.0
MODEL_SECONDS = 60.0
_BASE_SECONDS, _PATIENT_SECONDS = 60.0, 600.0
_SECONDS_PER_PATCH = 0.025
"""A tower of 600 M parameters takes 1.2 GFLOP per patch: 12 ms on a CPU that does 100 GFLOP/s, 6 ms more to send its
float32 pixels at 1 MB/s. Slower servers need an explicit timeout."""
_VALUES_PER_PATCH = 3 * 14 * 14
_BYTES_PER_PATCH = 32
"""Bytes per patch of a JPEG with good quality: 1.3 bits per pixel."""
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


MAX_RETRIES = 8
_FIRST_BACKOFF, _MAX_BACKOFF, _BACKOFF_FACTOR = 0.1, 0.4, 2
KEEPALIVE_SECONDS, KEEPALIVE_TIMEOUT = 12, 8
"""Interval and timeout of pings on a connection with calls. The server allows pings every 10 s."""
_SHORTEST_ATTEMPT = 0.1
"""Seconds that must be left for an attempt; else the last error, which has the reason, is raised."""
_ACCEPT_SHARE = 1 / 3
_MAX_UNANSWERED = 2
_REASON_SECONDS = 1.0


class Policy(NamedTuple):
    """When a client retries."""

    max_retries: int = MAX_RETRIES
    wait_for_ready: bool = False


class Attempts:
    """The attempts of one RPC within its deadline. Used by one thread or task at a time."""

    def __init__(self, policy: Policy, deadline: Deadline) -> None:
        self._policy = policy
        self._deadline = deadline
        self._began = time.monotonic()
        self._count = 1
        self._refusal: Unavailable | None = None
        self.reason: VitwireError | None = None
        """Why no server is ready, if known."""
        self._reason_asked_at = float("-inf")
        self.answered()

    def answered(self) -> None:
        """The server answered an item: restart the count of retries."""
        self._retries, self._unanswered, self._delay = self._policy.max_retries, 0, _FIRST_BACKOFF

    def accept_timeout(self) -> float | None:
        """Seconds within which the server must accept the next attempt; None for no such limit.

        A working server accepts at once, so silence means that it is frozen. With long deadlines keepalive detects
        this. The last attempt has no limit. Raises DeadlineExceeded.
        """
        left = self.left()
        if left is None or self._retries < 1 or self._unanswered >= _MAX_UNANSWERED:
            return None
        accept_timeout = left * _ACCEPT_SHARE
        return accept_timeout if accept_timeout < KEEPALIVE_SECONDS + KEEPALIVE_TIMEOUT else None

    def left(self) -> float | None:
        """Seconds for the next attempt; None without a deadline. Raises DeadlineExceeded with the last error."""
        try:
            return self._deadline.left()
        except DeadlineExceeded as error:
            raise self._final(self._refusal or error) from None

    def unanswered(self) -> bool:
        """The server did not accept the attempt within `accept_timeout`; the next one starts at once.

        Returns whether to use another connection: at first, the same one leads to the target's next address.
        """
        self._count += 1
        self._retries -= 1
        self._unanswered += 1
        return self._unanswered > 1

    def delay(self, failure: VitwireError) -> float:
        """Seconds to wait before the next attempt. Raises the failure if no attempts are left."""
        if isinstance(failure, Unavailable) and not failure.is_permanent:
            self._refusal = failure
            delay, self._delay = self._delay, min(self._delay * _BACKOFF_FACTOR, _MAX_BACKOFF)
            delay *= random.uniform(0.8, 1.2)  # noqa: S311  # jitter, not a secret
            counted = not self._policy.wait_for_ready
        elif isinstance(failure, Overloaded) and failure.retry_after is not None:
            delay = max(failure.retry_after, _FIRST_BACKOFF) * random.uniform(1.0, 1.2)  # noqa: S311  # as above
            counted = True
        else:
            raise self._final(failure)
        if (counted and self._retries < 1) or not self._deadline.has(delay + _SHORTEST_ATTEMPT):
            raise self._final(failure)
        self._retries -= counted
        self._count += 1
        return delay

    def needs_reason(self) -> bool:
        """Whether to ask why no server is ready; True at most once a second."""
        now = time.monotonic()
        if now - self._reason_asked_at < _REASON_SECONDS or not self._deadline.has(0.0):
            return False
        self._reason_asked_at = now
        return True

    def _final(self, failure: VitwireError) -> VitwireError:
        """The failure to raise, with the number of attempts or the previous error."""
        if isinstance(failure, DeadlineExceeded) and self._refusal is not None:
            return DeadlineExceeded(
                f"{failure} (previous error: {self._refusal})",
                code=failure.code,
                item=failure.item,
                request_id=failure.request_id,
            )
        if not isinstance(failure, Unavailable) or failure.is_permanent:
            return failure
        seconds = time.monotonic() - self._began
        tried = f"gave up after {self._count} attempt{'s' * (self._count > 1)} in {seconds:.1f} s"
        return Unavailable(f"{failure} ({tried})", code=failure.code, item=failure.item, request_id=failure.request_id)
