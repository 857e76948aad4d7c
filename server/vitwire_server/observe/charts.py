"""Charts as inline SVG: lines over the last minutes, and bars of two parts. No script, no font, no link."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from math import ceil, log10

WIDTH, HEIGHT = 320, 120
_LEFT, _RIGHT, _TOP, _BOTTOM = 40, 8, 8, 20
_BAR_WIDTH, _BAR_HEIGHT = 240, 14


@dataclass(frozen=True, slots=True)
class Line:
    """A series over time; None leaves a gap."""

    name: str
    style: str
    """CSS class: `first`, or `second`, which is dashed."""
    values: Sequence[float | None]


def line_chart(title: str, unit: str, times: Sequence[float], span: float, lines: Sequence[Line]) -> str:
    """Lines over the last `span` seconds; `times` belong to the values, the last one is now."""
    known = [value for line in lines for value in line.values if value is not None]
    top = nice(max(known, default=0.0))
    latest = ", ".join(f"{line.name} {_latest(line, unit)}" for line in lines)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(f"{title}, now: {latest}")}">',
        *_axes(top, span),
    ]
    for line in lines:
        for run in _runs(times, line.values):
            points = " ".join(
                f"{_x(at - times[-1], span):.1f},{_y(value, top):.1f}"
                for at, value in (run * 2 if len(run) < 2 else run)
            )
            parts.append(f'<polyline class="{line.style}" points="{points}"/>')
    return "".join([*parts, "</svg>"])


def bar(first: float, second: float, most: float) -> str:
    """A bar of two parts; its length is their sum relative to `most`."""
    scale = _BAR_WIDTH / most if most else 0.0
    width, rest = first * scale, second * scale
    return (
        f'<svg class="bar" viewBox="0 0 {_BAR_WIDTH} {_BAR_HEIGHT}" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect class="ground" width="{_BAR_WIDTH}" height="{_BAR_HEIGHT}"/>'
        f'<rect class="real" width="{width:.2f}" height="{_BAR_HEIGHT}"/>'
        f'<rect class="padding" x="{width:.2f}" width="{rest:.2f}" height="{_BAR_HEIGHT}"/></svg>'
    )


def nice(value: float) -> float:
    """The next 1, 2 or 5 times a power of ten: the upper end of an axis."""
    if value <= 0:
        return 1.0
    power = 10.0 ** (ceil(log10(value)) - 1)
    return next((step * power for step in (1, 2, 5, 10) if step * power >= value * (1 - 1e-9)), 10 * power)


def _axes(top: float, span: float) -> Iterator[str]:
    for share in (0.0, 0.5, 1.0):
        y = _y(top * share, top)
        yield f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text x="{_LEFT - 4}" y="{y + 3:.1f}" text-anchor="end">{top * share:g}</text>'
    minutes = round(span / 60)
    yield f'<text x="{_LEFT}" y="{HEIGHT - 5}">{minutes} min ago</text>'
    yield f'<text x="{WIDTH - _RIGHT}" y="{HEIGHT - 5}" text-anchor="end">now</text>'


def _runs(times: Sequence[float], values: Sequence[float | None]) -> Iterator[list[tuple[float, float]]]:
    """The runs of values between gaps."""
    for is_gap, run in groupby(zip(times, values, strict=True), key=lambda point: point[1] is None):
        if not is_gap:
            yield [(at, value) for at, value in run if value is not None]


def _latest(line: Line, unit: str) -> str:
    value = next((each for each in reversed(line.values) if each is not None), None)
    return "none" if value is None else f"{value:.3g} {unit}".strip()


def _x(ago: float, span: float) -> float:
    return WIDTH - _RIGHT + max(-1.0, ago / span) * (WIDTH - _LEFT - _RIGHT)


def _y(value: float, top: float) -> float:
    return HEIGHT - _BOTTOM - value / top * (HEIGHT - _TOP - _BOTTOM)
