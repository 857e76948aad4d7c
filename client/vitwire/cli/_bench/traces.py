"""Traces as `vitwire-server serve --record-trace` writes them: a JSON line per request, sizes and no pixels."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitwire.items import Modality

_LINE = '{"t": seconds, "items": [{"modality": "image", "grid": [t, h, w]}]}'


@dataclass(frozen=True, slots=True)
class Size:
    """The size of one item."""

    modality: Modality
    grid: tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival."""

    requests: Sequence[Sequence[Size]]
    times: Sequence[float]
    """Seconds, ascending; empty if the trace has none."""


def read(path: Path) -> Trace:
    """Read a trace. A time that is smaller than the one before starts another recording, which follows the last one.

    Raises OSError, or ValueError that names file and line.
    """
    requests: list[Sequence[Size]] = []
    times: list[float] = []
    offset = last = 0.0
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            sizes, moment = _request(line, f"{path}:{number}")
            requests.append(sizes)
            if moment is not None:
                offset += last if moment < last else 0.0
                last = moment
                times.append(offset + moment)
    if not requests:
        raise ValueError(f"{path}: the trace has no requests")
    if times and len(times) != len(requests):
        raise ValueError(f'{path}: some lines have no "t"; give it to all or to none')
    return Trace(requests, times)


def _request(line: str, where: str) -> tuple[Sequence[Size], float | None]:
    try:
        request: dict[str, Any] = json.loads(line)
        sizes = [_size(item) for item in request["items"]]
        moment = None if request.get("t") is None else float(request["t"])
        if not sizes or (moment is not None and not 0 <= moment < float("inf")):
            raise ValueError("no items, or a time that is not a positive number")
    except (ValueError, OverflowError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{where}: expected {_LINE}, got {error!r}") from error
    return sizes, moment


def _size(item: dict[str, Any]) -> Size:
    t, h, w = (int(side) for side in item["grid"])
    modality = item.get("modality", "image")
    if min(t, h, w) < 1 or modality not in ("image", "video"):
        raise ValueError(f"modality {modality!r} of grid {[t, h, w]}")
    return Size(modality, (t, h, w))
