"""When an RPC is sent again, and how long a server may stay silent: decided here for both clients."""

import random
import time
from dataclasses import dataclass

from vitwire._deadline import Deadline
from vitwire._errors import DeadlineExceeded, Overloaded, Unavailable, VitwireError

MAX_RETRIES = 8
_FIRST_BACKOFF, _MAX_BACKOFF, _BACKOFF_FACTOR = 0.1, 0.4, 2
KEEPALIVE_SECONDS, KEEPALIVE_TIMEOUT = 12, 8
"""Pings on a connection with calls, and how long each may go unanswered. The server takes pings every 10 s."""
_SHORTEST_ATTEMPT = 0.1
"""Seconds: one that is shorter would only turn a refusal, which says what is wrong, into DEADLINE_EXCEEDED."""
_SILENT_SHARE = 1 / 3
_MAX_SILENT = 2
_REASON_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Policy:
    """What a client retries. Raises ValueError for a negative number."""

    max_retries: int = MAX_RETRIES
    wait_for_ready: bool = False

    def __post_init__(self) -> None:
        if self.max_retries < 0:
            raise ValueError(f"max_retries is at least 0, not {self.max_retries}")


class Attempts:
    """The attempts of one RPC within its deadline; of one thread or task at a time."""

    def __init__(self, policy: Policy, deadline: Deadline) -> None:
        self._policy = policy
        self._deadline = deadline
        self._began = time.monotonic()
        self._count = 1
        self._refusal: Unavailable | None = None
        self.reason: VitwireError | None = None
        """Why no server is ready, as far as it was asked."""
        self._explained_at = float("-inf")
        self.progress()

    def progress(self) -> None:
        """The server answered something: what fails from now on is counted anew."""
        self._retries, self._silent, self._delay = self._policy.max_retries, 0, _FIRST_BACKOFF

    def patience(self) -> float | None:
        """Seconds within which a server has to accept the next attempt; None if it may take all that is left.

        A working server accepts at once, so silence means a frozen one. Where a share of the deadline is longer than
        keepalive takes, keepalive finds it. The last attempt has no bound. Raises DeadlineExceeded.
        """
        left = self.left()
        if left is None or self._retries < 1 or self._silent >= _MAX_SILENT:
            return None
        patience = left * _SILENT_SHARE
        return patience if patience < KEEPALIVE_SECONDS + KEEPALIVE_TIMEOUT else None

    def left(self) -> float | None:
        """Seconds for the next attempt; None without a deadline. Raises the last refusal, or DeadlineExceeded."""
        try:
            return self._deadline.left()
        except DeadlineExceeded as error:
            raise self._final(self._refusal or error) from None

    def silent(self) -> None:
        """An attempt was given up because nothing came within `patience`; the next one starts at once."""
        self._count += 1
        self._retries -= 1
        self._silent += 1

    def delay(self, failure: VitwireError) -> float:
        """Seconds to wait before the next attempt. Raises the failure if there is to be none."""
        if isinstance(failure, Unavailable):
            self._refusal = failure
            delay, self._delay = self._delay, min(self._delay * _BACKOFF_FACTOR, _MAX_BACKOFF)
            delay *= random.uniform(0.8, 1.2)  # noqa: S311  # spreads load, keeps no secret
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
        """Whether it is time to ask why no server is ready; at most once a second."""
        now = time.monotonic()
        if now - self._explained_at < _REASON_SECONDS or not self._deadline.has(0.0):
            return False
        self._explained_at = now
        return True

    def _final(self, failure: VitwireError) -> VitwireError:
        """The failure to raise, with what was tried before."""
        if isinstance(failure, DeadlineExceeded) and self._refusal is not None:
            return DeadlineExceeded(f"{failure} (before that: {self._refusal})", code=failure.code, item=failure.item)
        if not isinstance(failure, Unavailable):
            return failure
        seconds = time.monotonic() - self._began
        tried = f"gave up after {self._count} attempt{'s' * (self._count > 1)} in {seconds:.1f} s"
        return Unavailable(f"{failure} ({tried})", code=failure.code, item=failure.item)
