"""What came of the requests of a stream, and its figures."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil
from statistics import fmean, median
from typing import Any

from bench.engine.loads import Load

Row = dict[str, Any]


@dataclass(slots=True)
class Answer:
    """One request; times are of the system's monotonic clock, in seconds, in all processes."""

    start: float = 0.0
    end: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    """When each message with new tokens arrived."""
    tokens: list[int] = field(default_factory=list)
    moments: dict[str, float] = field(default_factory=dict)
    """When each stage of the request was reached."""
    spans: dict[str, float] = field(default_factory=dict)
    """Seconds of what has no place on this clock."""
    error: str = ""
    cached: bool = False
    """Whether the server had rows of it in its cache."""

    def note_server(self, moment: str, at: float, reports: Sequence[Any]) -> None:
        """When the server had done this, and what it reports: the longest of a request's items."""
        self.moments[moment] = at
        self.cached = any(report.path == "cache" for report in reports)
        self.spans["server_queued"] = max(report.queued for report in reports)
        self.spans["server_encoded"] = max(report.encoded for report in reports)


def quantile(values: Sequence[float], share: float) -> float:
    """The nearest rank."""
    return sorted(values)[max(0, ceil(share * len(values)) - 1)]


def figures(answers: Sequence[Answer], load: Load) -> Row:
    """Quantiles of TTFT and of the times between tokens, and requests per second without the edges of the stream."""
    good = [answer for answer in answers if not answer.error]
    row: Row = {"requests": len(answers), "errors": len(answers) - len(good)}
    if cached := sum(answer.cached for answer in answers):
        row["cached"] = cached
    first = [1e3 * (answer.arrivals[0] - answer.start) for answer in good]
    row |= quantiles("ttft", first, 50, 90, 99) | between_tokens(good)
    if good:
        row["requests_per_s"] = round(rate(good, load), 2)
    return row


def between_tokens(answers: Sequence[Answer]) -> Row:
    """Quantiles of the times between tokens."""
    gaps = [1e3 * (later - earlier) for answer in answers for earlier, later in pairwise(answer.arrivals)]
    return quantiles("itl", gaps, 50, 99)


def quantiles(name: str, values: Sequence[float], *percent: int) -> Row:
    """Columns with these percentiles, of values in milliseconds; none without values."""
    return {f"{name}_p{each}_ms": round(quantile(values, each / 100), 2) for each in percent if values}


def rate(answers: Sequence[Answer], load: Load) -> float:
    """Requests per second.

    Of a closed loop: those in flight over the mean seconds of those that neither began with the stream nor ended while
    it ran dry. Of arrivals: those that ended after the first one, over the time since then.
    """
    ends = sorted(answer.end for answer in answers)
    if not load.closed:
        return (len(ends) - 1) / (ends[-1] - ends[0]) if len(ends) > 1 else 0.0
    flight = min(int(load.amount), len(answers))
    inner = sorted(answers, key=lambda answer: answer.start)[flight:]
    inner = [answer for answer in inner if answer.end <= ends[-flight]] or list(answers)
    return flight / fmean(answer.end - answer.start for answer in inner)


def timeline(answers: Sequence[Answer]) -> Row:
    """Medians in milliseconds: of each moment since the request's start, then of each span."""
    good = [answer for answer in answers if not answer.error]
    found: dict[str, list[float]] = {}
    for answer in good:
        for name, moment in answer.moments.items():
            found.setdefault(name, []).append(1e3 * (moment - answer.start))
    row = {name: round(median(values), 2) for name, values in found.items()}
    row = dict(sorted(row.items(), key=lambda each: each[1]))
    for name in dict.fromkeys(name for answer in good for name in answer.spans):
        row[name] = round(1e3 * median(answer.spans[name] for answer in good if name in answer.spans), 2)
    return row


def compared(ours: Sequence[Answer], local: Sequence[Answer]) -> Row:
    """Greedy tokens of the same requests: how many agree in the first token, in all, and how far on average."""
    pairs = [(a.tokens, b.tokens) for a, b in zip(ours, local, strict=True) if not (a.error or b.error)]
    same = [_common(a, b) for a, b in pairs]
    return {
        "compared": len(pairs),
        "first_equal": sum(length > 0 for length in same),
        "all_equal": sum(a == b for a, b in pairs),
        "mean_equal_tokens": round(fmean(same), 2) if same else None,
    }


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common beginning."""
    return next((index for index, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
