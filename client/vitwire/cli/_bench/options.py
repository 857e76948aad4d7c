"""Options of `vitwire bench`, checked against each other before anything is sent."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from vitwire.cli._bench.arrivals import Arrivals, poisson, recorded, uniform
from vitwire.cli._bench.load import Pace
from vitwire.cli._bench.pictures import Form
from vitwire.cli._bench.traces import Trace
from vitwire.cli._bench.workload import ImageSize

MAX_CONCURRENCY = 1024
"""Each request in flight takes a thread and a copy of its pixels."""
CLOSED_CONCURRENCY = 8
OPEN_CONCURRENCY = 256

Sizes = Annotated[
    list[str] | None,
    typer.Option(
        help="Size of the random images, WIDTHxHEIGHT. Repeat the option to alternate between sizes, or add weights to "
        "draw them at random: --size 448x448:3 --size 1024x1024:1."
    ),
]
SentAs = Annotated[
    Form,
    typer.Option(
        "--as",
        help="What is sent for a --size: pixels as the model's processor returns them for it, the picture (RGB), which "
        "the server prepares, or a JPEG file of it (needs Pillow).",
    ),
]
Concurrency = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=MAX_CONCURRENCY,
        help=f"Most requests in flight. Default: {CLOSED_CONCURRENCY}, or {OPEN_CONCURRENCY} with arrivals at a rate.",
    ),
]
Rate = Annotated[
    float | None,
    typer.Option(min=0.001, help="Requests per second, whether earlier ones were answered or not; else back to back."),
]
ArrivalsOption = Annotated[
    Arrivals | None,
    typer.Option(
        help="Times of requests with --rate or --trace. Default: trace with a trace that has times, else poisson."
    ),
]
TraceFile = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        help="Send the sizes of this trace, which vitwire-server serve --record-trace wrote, at its times; "
        "with --rate these are stretched to that mean rate.",
    ),
]
MetricsPages = Annotated[
    list[str] | None,
    typer.Option(
        "--metrics", help="Metrics page of the server, http://HOST:PORT/metrics; repeat the option for each replica."
    ),
]


@dataclass(frozen=True, slots=True)
class Options:
    """How requests arrive."""

    sizes: tuple[ImageSize, ...]
    concurrency: int | None
    rate: float | None
    arrivals: Arrivals | None
    trace: Trace | None
    seconds: float
    requests: int | None

    def __post_init__(self) -> None:
        """Raises BadParameter, naming the option."""
        if self.rate is not None and not math.isfinite(self.rate):
            raise typer.BadParameter(f"{self.rate} is not a finite number", param_hint="--rate")
        if self.arrivals == "trace" and not (self.trace and self.trace.times):
            raise typer.BadParameter("trace needs a --trace whose lines have times", param_hint="--arrivals")
        if self.arrivals in ("poisson", "uniform") and self.rate is None:
            raise typer.BadParameter(f"{self.arrivals} needs --rate", param_hint="--arrivals")

    @property
    def chosen_arrivals(self) -> Arrivals | None:
        """None where requests follow each other back to back."""
        if self.arrivals is not None:
            return self.arrivals
        if self.trace and self.trace.times:
            return "trace"
        return None if self.rate is None else "poisson"

    def pace(self) -> Pace:
        """As the options say. Raises ValueError for a trace without a rate of its own."""
        arrivals = self.chosen_arrivals
        if arrivals is None:
            return Pace(self.concurrency or CLOSED_CONCURRENCY, self.seconds, self.requests)
        return self._open(arrivals, self.rate, self.seconds, self.concurrency or OPEN_CONCURRENCY, self.requests)

    def pace_at(self, rate: float, seconds: float, concurrency: int) -> Pace:
        """For a trial at a rate, whatever `rate` says."""
        return self._open(self.chosen_arrivals or "poisson", rate, seconds, self.concurrency or concurrency, None)

    def _open(
        self, arrivals: Arrivals, rate: float | None, seconds: float, concurrency: int, requests: int | None
    ) -> Pace:
        if arrivals == "trace":
            assert self.trace is not None
            times = self.trace.times
            if rate is None and times[-1] <= times[0]:
                raise ValueError("--trace: the trace has no two different times: set --rate")
            return Pace(concurrency, seconds, requests, recorded(times, rate))
        assert rate is not None
        due = uniform(rate) if arrivals == "uniform" else poisson(rate)
        return Pace(concurrency, seconds, requests, due)


def sizes_of(texts: list[str] | None) -> tuple[ImageSize, ...]:
    """Raises BadParameter for a size that cannot be read."""
    try:
        return tuple(map(ImageSize.parse, texts or ["448x448"]))
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--size") from error
