"""The search for the highest rate at which a service keeps its latency. Pure: it decides which rate to try next."""

import math
from dataclasses import dataclass

GROWTH = 2.0
"""Factor from one rate to the next, until one holds and one does not."""
TOLERANCE = 1.05
"""The search ends when the lowest rate that failed is at most this many times the highest that held."""
CONFIRMATIONS = 3
MAX_TRIALS = 40
MISSES = 0.01
"""Share of requests that may miss the limit: the 99th percentile."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """One trial."""

    rate: float
    seconds: float
    requests: int
    missed: int
    p50_ms: float | None
    """Of answered requests; None without."""
    p99_ms: float | None
    holds: bool
    limited_by: str | None


@dataclass(slots=True)
class Search:
    """Brackets the capacity by growth, halves the bracket in the logarithm, and confirms the result by more trials.

    A trial that contradicts an earlier one narrows the bracket to the pessimistic side: a rate that held once and
    then failed counts as failed.
    """

    rate: float
    """The rate to try next."""
    lowest: float = 0.01
    highest: float = 1e6
    held: float | None = None
    """Highest rate that held, below every rate that failed."""
    failed: float | None = None
    """Lowest rate that failed."""
    confirmed: int = 0
    """Trials of `held` that held, after the bracket was closed."""
    trials: int = 0
    _settled: bool = False
    _once_held: bool = False

    @property
    def done(self) -> bool:
        """Whether the search is over: confirmed, nothing holds, or out of trials."""
        return self._settled or self.trials >= MAX_TRIALS

    @property
    def capacity(self) -> float | None:
        """The rate that was confirmed; None before, or if no rate was."""
        return self.held if self.confirmed >= CONFIRMATIONS else None

    @property
    def confirming(self) -> bool:
        """Whether the next trial repeats the rate that held."""
        return self.rate == self.held

    def record(self, holds: bool) -> None:
        """The result of a trial of `rate`; chooses the next rate, or ends the search."""
        self.trials += 1
        if holds:
            self.confirmed += self.confirming
            self.held = self.rate if self.held is None else max(self.held, self.rate)
            self._once_held = True
        else:
            self.failed = self.rate if self.failed is None else min(self.failed, self.rate)
            if self.held is not None and self.held >= self.failed:
                self.held = None
            self.confirmed = 0
        self._settled = self.confirmed >= CONFIRMATIONS or (self.held is None and self.rate <= self.lowest)
        if not self._settled:
            self.rate = self._next()

    def _next(self) -> float:
        if self.held is None:
            assert self.failed is not None
            return max(self.lowest, self.failed / (TOLERANCE**2 if self._once_held else GROWTH))
        if self.failed is None:
            return min(self.highest, self.held * GROWTH)
        return self.held if self.failed <= self.held * TOLERANCE else math.sqrt(self.held * self.failed)


def holds(missed: int, requests: int) -> bool:
    """Whether at most `MISSES` of the requests missed the limit, all that were due being counted."""
    return requests > 0 and missed <= MISSES * requests


def trial_seconds(rate: float, seconds: float, limit_ms: float, *, confirming: bool) -> float:
    """Duration of a trial: at least `seconds`, and, up to 2 minutes, long enough for the requests and the limit.

    Trials that confirm a rate have 300 requests and 20 times the latency limit, others a third.
    """
    enough = max(300 / rate, 20 * limit_ms / 1e3) / (1 if confirming else 3)
    return max(seconds, min(120.0, enough))


def replicas(demand: float, capacity: float, headroom: float) -> int:
    """Replicas for a demand in requests per second, each loaded to `1 - headroom` of its capacity at most."""
    return max(1, math.ceil(demand / (capacity * (1 - headroom)) - 1e-9))
