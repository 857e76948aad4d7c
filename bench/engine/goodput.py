"""Goodput: the highest rate at which p99 of TTFT and of the times between tokens are within bounds."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

Row = dict[str, Any]
TTFT_BOUNDS = (200, 300, 500)
ITL_BOUNDS = (25, 50, 100)
"""Milliseconds."""


class Point(NamedTuple):
    """A measured rate of arrivals, in requests a second, and its p99 in milliseconds."""

    rate: float
    ttft: float
    itl: float


def goodput(points: Iterable[Point], ttft: float, itl: float) -> tuple[float | None, str]:
    """The highest rate within both bounds, interpolated on the line between measured rates, and how it is bounded.

    The bound is "" for a rate between two points, "at least" if all points are within, and "below" with no rate if
    even the lowest one is not. The curve ends at its first point outside, so that luck further up does not count.
    """
    curve = sorted(points)
    if not curve:
        return None, "not measured"
    inside: Point | None = None
    for point in curve:
        if point.ttft <= ttft and point.itl <= itl:
            inside = point
            continue
        if inside is None:
            return None, f"below {point.rate:g}"
        crossings = [
            _crossing(inside.rate, before, point.rate, after, bound)
            for before, after, bound in ((inside.ttft, point.ttft, ttft), (inside.itl, point.itl, itl))
            if after > bound
        ]
        return min(crossings), ""
    return curve[-1].rate, "at least"


def _crossing(low: float, before: float, high: float, after: float, bound: float) -> float:
    """Where the line from (low, before) to (high, after) reaches the bound."""
    return low + (high - low) * (bound - before) / (after - before)


def grid(streams: Sequence[Row]) -> list[Row]:
    """A row for each size and pair of bounds: goodput by setup, and its ratio to `local` where both are known.

    Streams of all sittings are one curve: points of one rate become their mean.
    """
    curves: dict[str, dict[str, dict[float, list[Point]]]] = {}
    for each in streams:
        if each["load"].startswith("p") and each.get("ttft_p99_ms") and each.get("itl_p99_ms") and not each["errors"]:
            point = Point(float(each["load"][1:]), each["ttft_p99_ms"], each["itl_p99_ms"])
            rates = curves.setdefault(each["size"], {}).setdefault(each["setup"], {})
            rates.setdefault(point.rate, []).append(point)
    rows = []
    for size, setups in curves.items():
        for ttft in TTFT_BOUNDS:
            for itl in ITL_BOUNDS:
                found = {name: goodput(map(_mean, rates.values()), ttft, itl) for name, rates in setups.items()}
                row: Row = {"size": size, "ttft_p99_ms": ttft, "itl_p99_ms": itl}
                rows.append(row | {name: _said(*each) for name, each in found.items()} | _ratios(found))
    return rows


def _mean(points: Sequence[Point]) -> Point:
    return Point(*(sum(values) / len(points) for values in zip(*points, strict=True)))


def _said(rate: float | None, bound: str) -> float | str:
    if rate is None:
        return bound
    return f"{bound} {rate:.1f}" if bound else round(rate, 2)


def _ratios(found: dict[str, tuple[float | None, str]]) -> Row:
    """Only of rates between two points: the others are bounds."""
    base, bound = found.get("local", (None, ""))
    known = {name: rate for name, (rate, said) in found.items() if rate and not said and name != "local"}
    return {f"{name}_ratio": round(rate / base, 3) for name, rate in known.items()} if base and not bound else {}
