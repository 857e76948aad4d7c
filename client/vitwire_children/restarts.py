"""When a child process that failed is started again. Standard library only."""

import time
from dataclasses import dataclass

STEADY_SECONDS = 60.0
"""After which a failure counts as the first."""


@dataclass(slots=True)
class Restarts:
    """Failures in a row, with a pause after each that is twice as long as the one before."""

    first: float = 0.5
    """Seconds of the first pause."""
    longest: float = 30.0
    failures: int = 0
    well_since: float | None = None
    """When the child was ready; if nobody notes that, when the last pause ended."""
    _until: float = 0.0

    @property
    def is_over(self) -> bool:
        """Whether the pause has ended."""
        return time.monotonic() >= self._until

    def failed(self) -> float:
        """Begin a pause; returns its seconds."""
        now = time.monotonic()
        is_steady = self.well_since is not None and now - self.well_since >= STEADY_SECONDS
        self.failures = 1 if is_steady else self.failures + 1
        pause = min(self.longest, self.first * 2.0 ** min(self.failures - 1, 99))
        self._until = self.well_since = now + pause
        return pause
