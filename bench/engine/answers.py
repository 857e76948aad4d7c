"""What came of the requests of a stream, and its figures.

Rate and times are of one window: for a closed loop it begins once as many requests have ended as are in flight, for
arrivals with a twentieth of them; it ends when the last request is sent. Times are of the requests sent in it, the
rate counts the requests that ended in it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from bench.engine.loads import Load

Row = dict[str, Any]
LEAST = 100
"""Requests of a window below which neither a rate nor a p99 is printed."""
_RESAMPLES = 400
STAGES = ("accepted", "queued", "fetched", "first_token")
"""Moments of a request whose images an encoder encodes, in this order: vLLM's front end has it from the router, the
scheduler sees it, the worker has the rows, the client has a token."""


@dataclass(slots=True)
class Answer:
    """One request; times are of the system's monotonic clock, in seconds, in all processes."""

    number: int = 0
    images: int = 0
    start: float = 0.0
    """When it was sent; of arrivals, when it was due, so that a client that is behind counts."""
    end: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    """When each message with new tokens arrived."""
    tokens: int = 0
    error: str = ""

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.arrivals[0] - self.start

    @property
    def gaps(self) -> list[float]:
        """Seconds between messages with tokens."""
        return [later - earlier for earlier, later in pairwise(self.arrivals)]


def window(answers: Sequence[Answer], load: Load) -> tuple[float, float]:
    """Begin and end of the inner part of a stream."""
    starts, ends = sorted(each.start for each in answers), sorted(each.end for each in answers)
    first = ends[min(int(load.amount), len(ends)) - 1] if load.closed else starts[len(starts) // 20]
    return first, starts[-1]


def figures(answers: Sequence[Answer], load: Load) -> Row:
    """Quantiles of TTFT and of the times between tokens, and requests a second; null where there are too few."""
    begin, end = window(answers, load)
    good = [each for each in answers if not each.error]
    inner = [each for each in good if begin <= each.start <= end]
    ended = sum(begin < each.end <= end for each in good)
    row: Row = {"requests": len(answers), "errors": len(answers) - len(good)}
    row |= {"inner": len(inner), "window_s": round(max(0.0, end - begin), 2), "requests_per_s": None}
    if ended >= LEAST:
        row["requests_per_s"] = round(ended / (end - begin), 2)
        row["tokens_per_s"] = round(row["requests_per_s"] * sum(each.tokens for each in good) / len(good))
    else:
        row["no_rate"] = f"{ended} requests ended in the window, {LEAST} are needed"
    row |= quantiles("ttft", [[each.ttft] for each in inner])
    row |= quantiles("itl", [each.gaps for each in inner])
    with_images = [1e3 * each.ttft for each in inner if each.images]
    if with_images and len(with_images) < len(inner):
        row["image_ttft_p50_ms"] = round(float(np.quantile(with_images, 0.5)), 2)
    return row


def quantiles(name: str, groups: Sequence[Sequence[float]]) -> Row:
    """p50, p90 and p99 in milliseconds, and the 95 % interval of the p99; null with too few requests.

    groups: seconds by request.
    """
    values = np.asarray([1e3 * each for group in groups for each in group])
    if not len(values):
        return {}
    p50, p90, p99 = (round(float(each), 2) for each in np.quantile(values, (0.5, 0.9, 0.99)))
    row: Row = {f"{name}_p50_ms": p50, f"{name}_p90_ms": p90}
    enough = len(groups) >= LEAST
    interval = bootstrap([[1e3 * each for each in group] for group in groups], 0.99) if enough else None
    return row | {f"{name}_p99_ms": p99 if enough else None, f"{name}_p99_interval": interval}


def bootstrap(groups: Sequence[Sequence[float]], share: float, seed: int = 0) -> list[float]:
    """The 95 % interval of a quantile: whole groups are drawn again, as values of one request depend on each other."""
    rng = np.random.default_rng(seed)
    lengths = np.asarray([len(group) for group in groups])
    padded = np.full((len(groups), max(lengths)), np.nan, np.float32)
    for number, group in enumerate(groups):
        padded[number, : len(group)] = group
    found = []
    for _ in range(_RESAMPLES if padded.size < 1e5 else _RESAMPLES // 4):
        drawn = rng.integers(0, len(groups), len(groups))
        values = padded[drawn].ravel()
        values = values if lengths.min() == lengths.max() else values[~np.isnan(values)]
        at = int(share * (len(values) - 1))
        found.append(float(np.partition(values, at)[at]))
    return [round(float(each), 2) for each in np.quantile(found, (0.025, 0.975))]


def spans(answers: Sequence[Answer], moments: Mapping[int, Mapping[str, float]], load: Load) -> Row:
    """Milliseconds between the moments of each request of the window, p50 and p99; empty without moments.

    moments: of the system's monotonic clock, by number of the request.
    """
    begin, end = window(answers, load)
    found: dict[str, list[float]] = {}
    for each in answers:
        if each.error or not begin <= each.start <= end or each.number not in moments:
            continue
        reached = {"sent": each.start, **moments[each.number], "first_token": each.arrivals[0]}
        names = ["sent", *(name for name in STAGES if name in reached)]
        if each.images and "fetched" in names:
            for earlier, later in pairwise(names):
                found.setdefault(f"{earlier}_{later}", []).append(1e3 * (reached[later] - reached[earlier]))
    row: Row = {"of": max(map(len, found.values()))} if found else {}
    for name, values in found.items():
        p50, p99 = np.quantile(values, (0.5, 0.99))
        row |= {f"{name}_p50_ms": round(float(p50), 2)}
        row |= {f"{name}_p99_ms": round(float(p99), 2)} if len(values) >= LEAST else {}
    return row
