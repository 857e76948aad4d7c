"""Measurements of a load, and their statistics."""

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from vitwire_cli.bench.load import NOT_SENT, Load, Sample

Array = npt.NDArray[np.float64]

_LATE_SECONDS = 0.005
_LATE_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Run:
    """A run of a load, and its results."""

    seconds: float
    samples: Sequence[Sample]
    cpu_seconds: float = 0.0
    """Processor time of the generator."""
    in_flight_max: int = 0
    cut: bool = False
    """Whether requests were due that are not among the samples."""
    concurrency: int = 0
    """Maximum requests in flight."""
    interrupted: bool = False

    @property
    def answered(self) -> list[Sample]:
        return [sample for sample in self.samples if not sample.error]

    @property
    def latencies(self) -> Array:
        """Latencies of answered requests in milliseconds, ascending."""
        return np.sort(np.array([sample.latency for sample in self.answered])) * 1e3

    @property
    def errors(self) -> dict[str, int]:
        """Requests that were not answered, by code."""
        return dict(Counter(sample.error for sample in self.samples if sample.error))

    def kept_pace(self, limit_ms: float | None = None) -> bool:
        """Whether the generator was on time, compared with a limit, or else with what it measured."""
        if self.cut or not self.samples:
            return not self.cut
        late, slow = (
            float(np.percentile([getattr(sample, name) for sample in self.samples], 99)) for name in ("late", "latency")
        )
        reference = slow if limit_ms is None else limit_ms / 1e3
        return late <= max(_LATE_SECONDS, _LATE_SHARE * reference)

    @property
    def due_rate(self) -> float:
        """Requests per second that were due."""
        span = max((sample.due for sample in self.samples), default=0.0)
        return len(self.samples) / span if span else 0.0

    def missed(self, limit_ms: float) -> int:
        """Requests not answered within a limit; those that failed or were not sent count as well."""
        return sum(bool(sample.error) or sample.latency * 1e3 > limit_ms for sample in self.samples)

    def limited_by(self, limit_ms: float | None = None) -> str | None:
        """The limit of the run, as far as the client can see; None if there was none.

        limit_ms: of a trial that failed, which always has a cause.
        """
        if not self.kept_pace(limit_ms):
            return "generator"
        if self._held_back(limit_ms):
            return "concurrency"
        if refused := self.errors.keys() - {NOT_SENT}:
            return f"errors {', '.join(sorted(refused))}"
        return None if limit_ms is None else "latency"

    def _held_back(self, limit_ms: float | None) -> bool:
        """Whether requests waited because too few could be in flight, although the service kept the limit."""
        if limit_ms is None:
            return NOT_SENT in self.errors
        return self.in_flight_max >= self.concurrency and self.concurrency / limit_ms * 1e3 < self.due_rate

    def document(self) -> dict[str, object]:
        """All results, for JSON."""
        answered = self.answered
        items = sum(len(sample.paths) for sample in answered)
        tokens = sum(sample.tokens for sample in answered)
        nbytes = sum(sample.nbytes for sample in answered)
        return {
            "seconds": round(self.seconds, 3),
            "requests": len(self.samples),
            "errors": self.errors,
            "items": items,
            "paths": dict(Counter(path for sample in answered for path in sample.paths)),
            "requests_per_second": round(len(answered) / self.seconds, 3),
            "items_per_second": round(items / self.seconds, 3),
            "tokens_per_second": round(tokens / self.seconds, 1),
            "megabytes_per_second": round(nbytes / self.seconds / 1e6, 3),
            "latency_ms": percentiles(self.latencies),
            "first_rows_ms": percentiles(np.array([sample.first_rows for sample in answered]) * 1e3),
            "queued_ms": percentiles(np.array([each for sample in answered for each in sample.queued]) * 1e3),
            "generator": self.generator(),
            "limited_by": self.limited_by(),
        }

    def generator(self) -> dict[str, object]:
        """Statistics of the generator itself."""
        late, waited = (np.array([getattr(each, name) for each in self.samples]) for name in ("late", "waited"))
        return {
            "kept_pace": self.kept_pace(),
            "cpu_cores": round(self.cpu_seconds / self.seconds, 3),
            "in_flight_max": self.in_flight_max,
            "late_p99_ms": percentiles(late * 1e3).get("p99"),
            "waited_p99_ms": percentiles(waited * 1e3).get("p99"),
        }


def percentiles(values: Array) -> dict[str, float]:
    """Percentiles by name; empty without values."""
    if not len(values):
        return {}
    shares = {"p50": 50, "p90": 90, "p95": 95, "p99": 99}
    found = {"mean": values.mean()} | {name: np.percentile(values, share) for name, share in shares.items()}
    return {name: round(float(value), 3) for name, value in (found | {"max": values.max()}).items()}


def run(load: Load) -> Run:
    """Run a load. Raises what the client raises in it."""
    seconds = _with_progress(load)
    return Run(
        seconds,
        load.samples,
        load.cpu_seconds,
        load.in_flight_max,
        load.cut,
        load.pace.concurrency,
        load.interrupted.is_set(),
    )


def _with_progress(load: Load) -> float:
    columns = (
        SpinnerColumn(),
        TextColumn("{task.completed} requests, {task.fields[errors]} errors"),
        TimeElapsedColumn(),
    )
    quiet = not sys.stderr.isatty()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=quiet) as progress:
        task = progress.add_task("", total=None, errors=0)
        errors = 0

        def update(sample: Sample) -> None:
            nonlocal errors
            errors += bool(sample.error)
            progress.update(task, advance=1, errors=errors)

        if not quiet:
            load.on_sample = update
        return load.run()
