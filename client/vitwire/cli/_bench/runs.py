"""Runs of a load against a service, with what the service reports about itself."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from vitwire import Client
from vitwire.cli._bench import scrape
from vitwire.cli._bench.load import Load, Pace
from vitwire.cli._bench.samples import NOT_SENT, Sample, Summary


@dataclass(frozen=True, slots=True)
class Run:
    """One run and its results."""

    summary: Summary
    usage: scrape.Usage | None
    """None without metrics pages."""
    concurrency: int
    interrupted: bool

    def limited_by(self, limit_ms: float | None = None) -> str | None:
        """What limited the run, as far as can be seen from here; None if nothing did.

        limit_ms: of a trial that failed, which always has a cause.
        """
        summary = self.summary
        if not summary.kept_pace(limit_ms):
            return "generator"
        if self._held_back(limit_ms):
            return "concurrency"
        refused = {code: count for code, count in summary.errors.items() if code != NOT_SENT}
        if self.usage and self.usage.bound:
            return self.usage.bound
        if refused:
            return f"errors {', '.join(sorted(refused))}"
        return None if limit_ms is None else "latency"

    def _held_back(self, limit_ms: float | None) -> bool:
        """Whether requests waited because too few could be in flight, although the service kept the limit."""
        if limit_ms is None:
            return NOT_SENT in self.summary.errors
        kept_rate = self.concurrency / limit_ms * 1e3
        return self.summary.in_flight_max >= self.concurrency and kept_rate < self.summary.due_rate

    def document(self) -> dict[str, object]:
        """For JSON."""
        return self.summary.document() | {
            "limited_by": self.limited_by(),
            "server": self.usage.document() if self.usage else None,
        }


@dataclass(frozen=True, slots=True)
class Runner:
    """Runs loads through one client."""

    client: Client
    pages: Sequence[str]
    """URLs of the server's metrics."""

    def run(self, load: Load) -> Run:
        """Raises what the client raises in the load, and OSError for a metrics page that cannot be read."""
        before = scrape.read(self.pages)
        seconds = _with_progress(load)
        usage = None
        if self.pages:
            usage = scrape.Usage(before, scrape.read(self.pages), seconds, len(self.pages))
        summary = Summary(seconds, load.samples, load.cpu_seconds, load.in_flight_max, load.cut)
        return Run(summary, usage, load.pace.concurrency, load.interrupted.is_set())


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


def closed_pace(seconds: float, concurrency: int) -> Pace:
    """As many requests as the service answers, back to back."""
    return Pace(concurrency, seconds)
