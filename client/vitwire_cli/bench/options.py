"""Options of `vitwire bench`, checked against each other before anything is sent, and when its requests are due."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Literal

import numpy as np
import typer

from vitwire._transport.connections import CONNECTIONS
from vitwire_cli.bench.load import Pace
from vitwire_cli.bench.workload import Form, ImageSize, Trace
from vitwire_flags.options import flag

Arrivals = Literal["poisson", "uniform", "trace"]

MAX_CONCURRENCY = 1024
"""Each request in flight takes a thread and a copy of its pixels."""
CLOSED_CONCURRENCY = 8
OPEN_CONCURRENCY = 256


@dataclass(frozen=True)
class Options:
    """All options but those of the connection. Raises BadParameter, naming the option."""

    size: tuple[str, ...] = flag(
        (),
        "Size of the random images, WIDTHxHEIGHT. Repeat the option to alternate between sizes, or add "
        "weights to draw them at random: --size 448x448:3 --size 1024x1024:1.",
    )
    items: int = flag(1, "Images or clips per request.", 1)
    frames: int = flag(0, "Send clips with this many frames instead of images.", 0)
    form: Form = flag(
        "pixels",
        "What is sent for a --size: pixels as the model's processor returns them for it, the picture (RGB), "
        "which the server prepares, or a JPEG file of it (needs Pillow).",
        param_decls=["--as"],
    )
    trace: Path | None = flag(
        None,
        "Send the sizes of this trace, which vitwire-server serve --record-trace wrote, at its times; "
        "with --rate these are stretched to that mean rate.",
    )
    concurrency: int | None = flag(
        None,
        f"Most requests in flight. Default: {CLOSED_CONCURRENCY}, or {OPEN_CONCURRENCY} with arrivals at a rate.",
        1,
        MAX_CONCURRENCY,
    )
    connections: int = flag(CONNECTIONS, "Maximum connections; a server with several RPC processes needs several.", 1)
    rate: float | None = flag(
        None, "Requests per second, whether earlier ones were answered or not; else back to back.", 0.001
    )
    arrivals: Arrivals | None = flag(
        None, "Times of requests with --rate or --trace. Default: trace with a trace that has times, else poisson."
    )
    seconds: float = flag(10.0, "Duration in seconds; with --find-capacity, the least for each trial.", 0.1)
    requests: int | None = flag(None, "Stop after this many requests.", 1)
    metrics: tuple[str, ...] = flag(
        (), "Metrics page of the server, http://HOST:PORT/metrics; repeat the option for each replica."
    )
    p99_ms: float = flag(
        500.0, "Latency that 99 % of requests must keep, for --find-capacity.", 0.1, param_decls=["--p99-ms"]
    )
    for_rate: float | None = flag(None, "With --find-capacity: print the replicas for this many requests/s.", 0.001)
    headroom: float = flag(0.3, "Share of the capacity that --for-rate leaves unused.", 0.0, 0.95)
    plot: Path | None = flag(None, "Write a plot of the latencies to this file; PNG, SVG, … by suffix.")
    search: bool = flag(
        False, "Search the highest rate at which 99 % of requests keep --p99-ms.", param_decls=["--find-capacity"]
    )
    repeat: bool = flag(False, "Send the same pixels each time, to measure the cache.", param_decls=["--repeat"])

    def __post_init__(self) -> None:
        checks = {
            "--requests": (self.search and self.requests is not None, "--find-capacity chooses the number of requests"),
            "--for-rate": (self.for_rate is not None and not self.search, "needs --find-capacity"),
            "--as": (self.form != "pixels" and self.trace, "a trace holds grids, so that only pixels can be sent"),
            "--frames": (self.form == "jpeg" and self.frames, "a clip cannot be a JPEG: leave out --frames"),
            "--rate": (not math.isfinite(self.rate or 0.0), f"{self.rate} is not a finite number"),
            "--arrivals": (
                self.arrivals in ("poisson", "uniform") and self.rate is None, f"{self.arrivals} needs --rate"
            ),
        }  # fmt: skip
        for name, (is_wrong, reason) in checks.items():
            if is_wrong:
                raise typer.BadParameter(reason, param_hint=name)

    @cached_property
    def sizes(self) -> tuple[ImageSize, ...]:
        """The sizes of random images. Raises BadParameter."""
        try:
            return tuple(map(ImageSize.parse, self.size or ("448x448",)))
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--size") from error

    @cached_property
    def recording(self) -> Trace | None:
        """The content of the trace. Raises OSError and ValueError."""
        return None if self.trace is None else Trace.read(self.trace)

    @property
    def chosen_arrivals(self) -> Arrivals | None:
        """None if requests follow each other back to back. Raises BadParameter, and as `recording`."""
        has_times = bool(self.recording and self.recording.times)
        if self.arrivals == "trace" and not has_times:
            raise typer.BadParameter("trace needs a --trace whose lines have times", param_hint="--arrivals")
        if self.arrivals is not None or has_times:
            return self.arrivals or "trace"
        return None if self.rate is None else "poisson"

    def pace(self) -> Pace:
        """As the options say. Raises as `chosen_arrivals`, and ValueError for a trace without a rate of its own."""
        if self.chosen_arrivals is None:
            return Pace(self.concurrency or CLOSED_CONCURRENCY, self.seconds, self.requests)
        due = self._due(self.chosen_arrivals, self.rate)
        return Pace(self.concurrency or OPEN_CONCURRENCY, self.seconds, self.requests, due)

    def pace_at(self, rate: float, seconds: float, concurrency: int) -> Pace:
        """For a trial at a rate, whatever `rate` says."""
        due = self._due(self.chosen_arrivals or "poisson", rate)
        return Pace(self.concurrency or concurrency, seconds, due=due)

    def _due(self, arrivals: Arrivals, rate: float | None) -> Iterator[float]:
        if arrivals == "trace":
            assert self.recording, "checked"
            return recorded(self.recording.times, rate)
        assert rate is not None, "checked"
        return uniform(rate) if arrivals == "uniform" else poisson(rate)


def poisson(rate: float, seed: int = 0) -> Iterator[float]:
    """Times in seconds, endlessly, of independent requests: exponential gaps, `rate` per second on average."""
    rng = np.random.default_rng(seed)
    moment = 0.0
    while True:
        moment += float(rng.exponential(1 / rate))
        yield moment


def uniform(rate: float) -> Iterator[float]:
    """Times with equal gaps."""
    return (number / rate for number in count())


def recorded(times: Sequence[float], rate: float | None = None) -> Iterator[float]:
    """The times of a trace from 0 on, repeated endlessly; with a rate, stretched so that it is the mean rate.

    Raises ValueError without a rate if the times do not have one: fewer than two, or all equal.
    """
    span = times[-1] - times[0] if times else 0.0
    if span <= 0:
        if rate is None:
            raise ValueError("--trace: the trace has no two different times: set --rate")
        return uniform(rate)
    mean_gap = span / (len(times) - 1)
    scale = 1.0 if rate is None else 1 / (rate * mean_gap)
    return ((start * (span + mean_gap) + moment - times[0]) * scale for start in count() for moment in times)
