"""Options of `vitwire bench`, checked against each other before anything is sent, and when its requests are due."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Literal

import numpy as np
import typer

from vitwire import Item
from vitwire._transport.connections import CONNECTIONS
from vitwire_cli.bench.load import Pace
from vitwire_cli.bench.workload import Form, ImageSize
from vitwire_flags.options import flag

Arrivals = Literal["poisson", "uniform"]

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
    clip: Path | None = flag(None, "Send this file of a clip instead; bytes behind its end make each copy differ.")
    form: Form = flag(
        "pixels",
        "What is sent for a --size: pixels as the model's processor returns them for it, the picture (RGB), "
        "which the server prepares, or a JPEG file of it (needs Pillow).",
        param_decls=["--as"],
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
    arrivals: Arrivals | None = flag(None, "Times of requests with --rate. Default: poisson.")
    seconds: float = flag(10.0, "Duration in seconds; with --find-capacity, the least for each trial.", 0.1)
    requests: int | None = flag(None, "Stop after this many requests.", 1)
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
            "--frames": (self.form == "jpeg" and self.frames, "a clip cannot be a JPEG: leave out --frames"),
            "--clip": (self.clip and (self.size or self.frames or self.form != "pixels"),
                       "a file has its size, frames and form: leave out --size, --frames and --as"),
            "--rate": (not math.isfinite(self.rate or 0.0), f"{self.rate} is not a finite number"),
            "--arrivals": (self.arrivals and self.rate is None, f"{self.arrivals} needs --rate"),
        }  # fmt: skip
        for name, (is_wrong, reason) in checks.items():
            if is_wrong:
                raise typer.BadParameter(reason, param_hint=name)

    @cached_property
    def sizes(self) -> tuple[ImageSize, ...]:
        """The sizes of random images; none with a clip. Raises BadParameter."""
        if self.clip:
            return ()
        try:
            return tuple(map(ImageSize.parse, self.size or ("448x448",)))
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--size") from error

    def clip_item(self) -> Item | None:
        """The clip, if it is one that is sent. Raises BadParameter."""
        try:
            item = Item.from_file(self.clip) if self.clip else None
        except OSError as error:
            raise typer.BadParameter(str(error), param_hint="--clip") from error
        if item and item.modality != "video":
            raise typer.BadParameter(f"{self.clip} is not an MP4, WebM, AVI or MPEG-TS file", param_hint="--clip")
        return item

    @property
    def chosen_arrivals(self) -> Arrivals | None:
        """None if requests follow each other back to back."""
        return None if self.rate is None else self.arrivals or "poisson"

    def pace(self) -> Pace:
        """As the options say."""
        if self.rate is None:
            return Pace(self.concurrency or CLOSED_CONCURRENCY, self.seconds, self.requests)
        return Pace(self.concurrency or OPEN_CONCURRENCY, self.seconds, self.requests, self._due(self.rate))

    def pace_at(self, rate: float, seconds: float, concurrency: int) -> Pace:
        """For a trial at a rate, whatever `rate` says."""
        return Pace(self.concurrency or concurrency, seconds, due=self._due(rate))

    def _due(self, rate: float) -> Iterator[float]:
        return uniform(rate) if self.arrivals == "uniform" else poisson(rate)


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
