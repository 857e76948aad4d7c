"""What came of the requests of a simulated fleet."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Row = dict[str, float]


@dataclass(slots=True)
class Tally:
    """Every request by the time at which it was due. Figures are of those that were due from `start` on."""

    start: float = 0.0
    arrived: int = 0
    """All that were submitted, those before `start` as well."""
    finished: int = 0
    """All that were answered or have failed."""
    due: list[float] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)
    """Seconds, infinite for a request that failed."""
    hits: int = 0
    retried: int = 0
    """Answered after at least one retry."""

    @property
    def unfinished(self) -> int:
        """Requests that are neither answered nor failed."""
        return self.arrived - self.finished

    def answered(self, due: float, now: float, *, hit: bool, retried: bool) -> None:
        """A request was answered."""
        self._finish(due, now - due)
        if due >= self.start:
            self.hits += hit
            self.retried += retried

    def failed(self, due: float) -> None:
        """A request has no retries left."""
        self._finish(due, float("inf"))

    def _finish(self, due: float, latency: float) -> None:
        self.finished += 1
        if due >= self.start:
            self.due.append(due)
            self.latencies.append(latency)

    def row(self, seconds: float) -> Row:
        """For a table. Percentiles are of the answered requests."""
        latencies = np.array(self.latencies)
        done = latencies[np.isfinite(latencies)]
        p50, p99 = np.percentile(done, (50, 99)) * 1e3 if len(done) else (0.0, 0.0)
        total = max(1, len(latencies))
        return {
            "images_per_second": round(len(done) / seconds),
            "p50_ms": round(float(p50), 1),
            "p99_ms": round(float(p99), 1),
            "hits": round(self.hits / total, 4),
            "retried": round(self.retried / total, 5),
            "failed": round(1 - len(done) / total, 5),
        }

    def late_windows(self, since: float, limit: float) -> npt.NDArray[np.int64]:
        """Seconds since `since` within which more than 1 % of the requests that were due exceeded the limit."""
        due, latencies = np.array(self.due), np.array(self.latencies)
        after = due >= since
        windows = (due[after] - since).astype(int)
        late = np.bincount(windows, latencies[after] > limit)
        return np.flatnonzero(late > 0.01 * np.bincount(windows))
