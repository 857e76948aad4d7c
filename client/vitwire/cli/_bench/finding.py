"""`vitwire bench --find-capacity`: trials at the rates that the search chooses, and the verdict."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from vitwire.cli._bench import capacity
from vitwire.cli._bench.capacity import Search, Verdict
from vitwire.cli._bench.runs import Run
from vitwire.cli._bench.samples import percentiles

Trial = Callable[[float, float, int], Run]
"""Runs a load: requests per second, seconds, maximum requests in flight."""

_MIN_CONCURRENCY = 64
_MAX_CONCURRENCY = 1024
_IN_FLIGHT = 4
"""Requests in flight that a trial allows, as a multiple of those at the latency limit (Little's law)."""


@dataclass(frozen=True, slots=True)
class Goal:
    """What is searched."""

    p99_ms: float
    seconds: float
    for_rate: float | None = None
    headroom: float = 0.3


@dataclass(slots=True)
class Finding:
    """Trials so far, and the rate that they found."""

    goal: Goal
    rate: float | None = None
    """Requests per second; None if no rate was confirmed."""
    limited_by: str | None = None
    """What limited the lowest rate that failed."""
    trials: list[Verdict] = field(default_factory=list)
    last: Run | None = None
    """The last trial that held."""
    interrupted: bool = False

    def document(self) -> dict[str, object]:
        """For JSON."""
        goal = self.goal
        needed = None
        if goal.for_rate is not None and self.rate is not None:
            needed = capacity.replicas(goal.for_rate, self.rate, goal.headroom)
        last = self.last.document() if self.last else {}
        return {
            "p99_limit_ms": goal.p99_ms,
            "capacity": None if self.rate is None else round(self.rate, 3),
            "limited_by": self.limited_by,
            "is_lower_bound": self.limited_by == "generator",
            "for_rate": goal.for_rate,
            "headroom": goal.headroom,
            "replicas": needed,
            "trials": [asdict(trial) for trial in self.trials],
            "confirmation": last,
        }


def find_capacity(goal: Goal, first_rate: float, trial: Trial, on_trial: Callable[[Verdict], None]) -> Finding:
    """Search from `first_rate` on. Ctrl-C in a trial ends the search without a result."""
    search, finding = Search(first_rate), Finding(goal)
    reasons: dict[float, str | None] = {}
    while not search.done:
        rate = search.rate
        seconds = capacity.trial_seconds(rate, goal.seconds, goal.p99_ms, confirming=search.confirming)
        run = trial(rate, seconds, concurrency_for(rate, goal.p99_ms))
        if run.interrupted:
            finding.interrupted = True
            return finding
        verdict = _verdict(run, rate, goal.p99_ms)
        finding.trials.append(verdict)
        on_trial(verdict)
        if verdict.holds:
            finding.last = run
        else:
            reasons[rate] = verdict.limited_by
        search.record(verdict.holds)
    finding.rate = search.capacity
    finding.limited_by = None if search.failed is None else reasons[search.failed]
    return finding


def concurrency_for(rate: float, limit_ms: float) -> int:
    """Requests in flight that a trial allows: more than a service within the limit ever has."""
    return min(_MAX_CONCURRENCY, max(_MIN_CONCURRENCY, round(_IN_FLIGHT * rate * limit_ms / 1e3)))


def _verdict(run: Run, rate: float, limit_ms: float) -> Verdict:
    """A trial holds if 99 % of all requests that were due were answered in time, the generator's delays included."""
    summary = run.summary
    missed, requests = summary.missed(limit_ms), len(summary.samples)
    holds = capacity.holds(missed, requests) and not summary.cut
    latency = percentiles(summary.latencies)
    return Verdict(
        rate=round(rate, 3),
        seconds=round(summary.seconds, 1),
        requests=requests,
        missed=missed,
        p50_ms=latency.get("p50"),
        p99_ms=latency.get("p99"),
        holds=holds,
        limited_by=None if holds else run.limited_by(limit_ms),
    )
