"""Rates of setups at equal p99 of TTFT, interpolated between the loads that were measured."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from bench.engine.answers import Row


class Point(NamedTuple):
    """A load of a setup, as measured."""

    load: str
    rate: float
    """Requests per second."""
    p99: float
    """Of TTFT, in milliseconds."""


class Rate(NamedTuple):
    """The highest rate within a bound of the p99."""

    rate: float
    at_least: bool
    """The highest load was still within the bound, so a higher one might reach more."""


def rate_within(points: Sequence[Point], bound: float) -> Rate | None:
    """Of the line through the points, in ascending order of load; None if even the first is beyond the bound."""
    rates = [point.rate for point in points if point.p99 <= bound]
    for one, other in pairwise(points):
        low, high = min(one, other, key=lambda each: each.p99), max(one, other, key=lambda each: each.p99)
        if low.p99 <= bound < high.p99:
            rates.append(low.rate + (high.rate - low.rate) * (bound - low.p99) / (high.p99 - low.p99))
    return Rate(max(rates), points[-1].p99 <= bound) if rates else None


def compared(ours: Sequence[Point], local: Sequence[Point]) -> list[Row]:
    """Rates of a setup and of all devices as local engines, within the p99 of each load of the latter.

    `requests_per_s` and `ratio` are None if no load of the setup is within it.
    """
    rows = []
    for point in local:
        mine, theirs = rate_within(ours, point.p99), rate_within(local, point.p99)
        assert theirs, "its p99 is within itself"
        row: Row = {"local_load": point.load, "ttft_p99_ms": point.p99, "local_requests_per_s": round(theirs.rate, 2)}
        row["requests_per_s"] = round(mine.rate, 2) if mine else None
        row["at_least"] = mine.at_least if mine else None
        rows.append(row | {"ratio": round(mine.rate / theirs.rate, 3) if mine else None})
    return rows


def turns(ratios: Sequence[tuple[str, float | None]]) -> list[Row]:
    """The side of the ratio to local engines at the first load, and each load from which it is on the other side.

    A ratio of None, no load within the bound, is below 1.
    """
    sides = [(load, "at least 1" if ratio is not None and ratio >= 1 else "below 1") for load, ratio in ratios]
    before = ["", *(side for _, side in sides)]
    return [{"from": load, "ratio": side} for (load, side), last in zip(sides, before, strict=False) if side != last]
