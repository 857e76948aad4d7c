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
    """Rates of a setup and of all devices as local engines, within each p99 that one of them has at a load.

    A rate is None if no load of the setup is within it.
    """
    rows = []
    for bound in sorted({point.p99 for point in (*ours, *local)}):
        mine, theirs = rate_within(ours, bound), rate_within(local, bound)
        row: Row = {"ttft_p99_ms": bound}
        for name, rate in (("", mine), ("local_", theirs)):
            row[f"{name}requests_per_s"] = round(rate.rate, 2) if rate else None
            row[f"{name}at_least"] = rate.at_least if rate else None
        rows.append(row | {"ratio": round(mine.rate / theirs.rate, 3) if mine and theirs else None})
    return rows


def turns(rates: Sequence[tuple[str, float | None, float | None]]) -> list[Row]:
    """At each load or bound, the rate of a setup and of local engines: the first, and those where another side leads.

    A rate of None, nothing within the bound, is the lower one.
    """
    sides = [(at, "at least 1" if (ours or 0) >= (local or 0) else "below 1") for at, ours, local in rates]
    before = ["", *(side for _, side in sides)]
    return [{"from": at, "ratio": side} for (at, side), last in zip(sides, before, strict=False) if side != last]
