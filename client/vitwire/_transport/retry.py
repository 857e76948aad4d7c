"""Retry policy of both clients: when to send an RPC again, and how long to wait for a silent server."""

import random
import time
from dataclasses import dataclass

from vitwire._transport.deadline import Deadline
from vitwire.errors import DeadlineExceeded, Overloaded, Unavailable, VitwireError

MAX_RETRIES = 8
_FIRST_BACKOFF, _MAX_BACKOFF, _BACKOFF_FACTOR = 0.1, 0.4, 2
KEEPALIVE_SECONDS, KEEPALIVE_TIMEOUT = 12, 8
"""Interval and timeout of pings on a connection with calls. The server allows pings every 10 s."""
_SHORTEST_ATTEMPT = 0.1
"""Seconds that must be left for an attempt; else the last error, which has the reason, is raised."""
_ACCEPT_SHARE = 1 / 3
_MAX_UNANSWERED = 2
_REASON_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Policy:
    """When a client retries. Raises ValueError for a negative number."""

    max_retries: int = MAX_RETRIES
    wait_for_ready: bool = False

    def __post_init__(self) -> None:
        if self.max_retries < 0:
            raise ValueError(f"max_retries must be at least 0, got {self.max_retries}")


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
