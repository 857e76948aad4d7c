"""`vitwire bench --find-capacity`: the search for the highest rate at which a service keeps its latency."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from vitwire_cli.bench.load import Pace
from vitwire_cli.bench.options import Options
from vitwire_cli.bench.results import Run, percentiles

GROWTH = 2.0
"""Factor from one rate to the next, until one holds and one does not."""
TOLERANCE = 1.05
"""The search ends when the lowest rate that failed is at most this many times the highest that held."""
CONFIRMATIONS = 3
MAX_TRIALS = 40
MISSES = 0.01
"""Share of requests that may miss the limit: the 99th percentile."""
_MIN_CONCURRENCY = 64
_MAX_CONCURRENCY = 1024
_IN_FLIGHT = 4
"""Requests in flight that a trial allows, as a multiple of those at the latency limit (Little's law)."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """One trial."""

    rate: float
    seconds: float
    requests: int
    missed: int
    p50_ms: float | None
    """Median of the answered requests; None if there are none."""
    p99_ms: float | None
    holds: bool
    limited_by: str | None

    @classmethod
    def of(cls, trial: Run, rate: float, limit_ms: float) -> "Verdict":
        """It holds if 99 % of all requests that were due were answered in time, the generator's delays included."""
        missed, requests = trial.missed(limit_ms), len(trial.samples)
        holds = requests > 0 and missed <= MISSES * requests and not trial.cut
        latency = percentiles(trial.latencies)
        return cls(
            rate=round(rate, 3),
            seconds=round(trial.seconds, 1),
            requests=requests,
            missed=missed,
            p50_ms=latency.get("p50"),
            p99_ms=latency.get("p99"),
            holds=holds,
            limited_by=None if holds else trial.limited_by(limit_ms),
        )


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


def trial_seconds(rate: float, seconds: float, limit_ms: float, *, confirming: bool) -> float:
    """Duration of a trial: at least `seconds`, and, up to 2 minutes, long enough for the requests and the limit.

    Trials that confirm a rate have 300 requests and 20 times the latency limit, others a third.
    """
    enough = max(300 / rate, 20 * limit_ms / 1e3) / (1 if confirming else 3)
    return max(seconds, min(120.0, enough))


def replicas(demand: float, capacity: float, headroom: float) -> int:
    """Replicas for a demand in requests per second, each loaded to `1 - headroom` of its capacity at most."""
    return max(1, math.ceil(demand / (capacity * (1 - headroom)) - 1e-9))


@dataclass(slots=True)
class Finding:
    """Trials so far, and the rate that they found."""

    options: Options
    rate: float | None = None
    """Requests per second; None if no rate was confirmed."""
    limited_by: str | None = None
    """The limit that the lowest failed rate met."""
    trials: list[Verdict] = field(default_factory=list)
    last: Run | None = None
    """The last trial that held."""
    interrupted: bool = False

    def document(self) -> dict[str, object]:
        asked, needed = self.options, None
        if asked.for_rate is not None and self.rate is not None:
            needed = replicas(asked.for_rate, self.rate, asked.headroom)
        return {
            "p99_limit_ms": asked.p99_ms,
            "capacity": None if self.rate is None else round(self.rate, 3),
            "limited_by": self.limited_by,
            "is_lower_bound": self.limited_by == "generator",
            "for_rate": asked.for_rate,
            "headroom": asked.headroom,
            "replicas": needed,
            "trials": [asdict(trial) for trial in self.trials],
            "confirmation": self.last.document() if self.last else {},
        }


def find_capacity(
    options: Options, first_rate: float, run_at: Callable[[Pace], Run], on_trial: Callable[[Verdict], None]
) -> Finding:
    """Search from `first_rate` on. Ctrl-C in a trial ends the search without a result."""
    search, finding = Search(first_rate), Finding(options)
    reasons: dict[float, str | None] = {}
    while not search.done:
        rate, limit = search.rate, options.p99_ms
        seconds = trial_seconds(rate, options.seconds, limit, confirming=search.confirming)
        trial = run_at(options.pace_at(rate, seconds, concurrency_for(rate, limit)))
        if trial.interrupted:
            finding.interrupted = True
            return finding
        verdict = Verdict.of(trial, rate, limit)
        finding.trials.append(verdict)
        on_trial(verdict)
        if verdict.holds:
            finding.last = trial
        else:
            reasons[rate] = verdict.limited_by
        search.record(verdict.holds)
    finding.rate = search.capacity
    finding.limited_by = None if search.failed is None else reasons[search.failed]
    return finding


def concurrency_for(rate: float, limit_ms: float) -> int:
    """Requests in flight that a trial allows: more than a service within the limit ever has."""
    return min(_MAX_CONCURRENCY, max(_MIN_CONCURRENCY, round(_IN_FLIGHT * rate * limit_ms / 1e3)))
