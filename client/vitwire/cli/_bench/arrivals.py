"""When requests of an open loop are due, in seconds since its start. Endless, ascending and free of clocks."""

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Literal

import numpy as np

Arrivals = Literal["poisson", "uniform", "trace"]


def poisson(rate: float, seed: int = 0) -> Iterator[float]:
    """Independent requests: exponential gaps, `rate` per second on average."""
    rng = np.random.default_rng(seed)
    moment = 0.0
    while True:
        moment += float(rng.exponential(1 / rate))
        yield moment


def uniform(rate: float) -> Iterator[float]:
    """Equal gaps."""
    for number in count():
        yield number / rate


def recorded(times: Sequence[float], rate: float | None = None) -> Iterator[float]:
    """The times of a trace from 0 on, repeated endlessly; with a rate, stretched so that it is the mean rate.

    Raises ValueError without a rate if the times do not have one: fewer than two, or all equal.
    """
    span = times[-1] - times[0] if times else 0.0
    if span <= 0:
        if rate is None:
            raise ValueError("the trace has no two different times: set --rate")
        yield from uniform(rate)
        return
    mean_gap = span / (len(times) - 1)
    scale = 1.0 if rate is None else 1 / (rate * mean_gap)
    for start in count():
        for moment in times:
            yield (start * (span + mean_gap) + moment - times[0]) * scale
