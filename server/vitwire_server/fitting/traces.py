"""Recorded item sizes: JSON lines, one request each; sizes only, never pixels."""

import json
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from vitwire_server.core.grids import Footprint, Grid
from vitwire_server.core.items import Item

_log = logging.getLogger(__name__)
_MERGE = 2
"""Side of the merged squares that a line without a footprint stands for: what readers assume unless told."""


class TraceError(Exception):
    """A line of a trace is wrong; the message names file and line."""


class TraceWriter:
    """Appends a line per request to a trace; owns the file, used on the event loop only.

    Each line is one write at the file's end, so servers may share a file. An error is logged once and
    ends the recording, never a request.
    """

    def __init__(self, path: Path) -> None:
        """Raises OSError if the file cannot be opened."""
        self._file = path.open("ab", buffering=0)
        self._start = time.monotonic()

    def record(self, items: Iterable[Item]) -> None:
        """Write what was submitted together; nothing once closed."""
        sizes = [_size(item) for item in items]
        if self._file.closed or not sizes:
            return
        line = json.dumps({"t": round(time.monotonic() - self._start, 6), "items": sizes}).encode() + b"\n"
        try:
            if self._file.write(line) != len(line):
                raise OSError("incomplete write")
        except OSError as error:
            _log.error("stopped recording to %s: %s", self._file.name, error)
            self.close()

    def close(self) -> None:
        """End the recording."""
        with suppress(OSError):  # what cannot be written is lost either way
            self._file.close()


def _size(item: Item) -> dict[str, Any]:
    """Modality and grid, and the footprint where a reader would get another one from the grid."""
    size: dict[str, Any] = {"modality": item.modality, "grid": item.grid}
    grid, footprint = item.grid, item.footprint
    told = _divides(grid, _MERGE) and footprint == _of(grid, _MERGE)
    return size if told else size | {"footprint": footprint._asdict()}


def read_trace(path: Path, merge: int) -> list[Footprint]:
    """Footprints of all items of a trace in their order of arrival, each frame a segment.

    A line is `{"t": seconds, "items": [{"modality": "image", "grid": [t, h, w]}]}`; an item may have a
    `footprint`, which counts instead of the grid. Raises TraceError.
    """
    footprints: list[Footprint] = []
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    footprints += _items(line, merge, f"{path}:{number}")
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror}") from error
    if not footprints:
        raise TraceError(f"{path} has no items")
    return footprints


def _items(line: str, merge: int, where: str) -> Iterator[Footprint]:
    try:
        request: dict[str, Any] = json.loads(line)
        for item in request["items"]:
            t, h, w = item["grid"]
            told = item.get("footprint")
            yield _told(told) if told else _footprint(Grid(int(t), int(h), int(w)), merge)
    except (ValueError, KeyError, TypeError) as error:
        raise TraceError(f'{where}: expected {{"items": [{{"grid": [t, h, w]}}]}}, got {error!r}') from error


def _told(footprint: dict[str, int]) -> Footprint:
    told = Footprint(**{name: int(count) for name, count in footprint.items()})
    if min(told.patches, told.tokens, told.segments, told.longest) < 1 or min(told) < 0:
        raise ValueError(f"expected a footprint of positive counts, got {footprint}")
    return told


def _footprint(grid: Grid, merge: int) -> Footprint:
    if min(grid) < 1 or not _divides(grid, merge):
        raise ValueError(f"expected a grid of positive multiples of the merge size {merge}, got {list(grid)}")
    return _of(grid, merge)


def _divides(grid: Grid, merge: int) -> bool:
    return not (grid.h % merge or grid.w % merge)


def _of(grid: Grid, merge: int) -> Footprint:
    """Of an item whose frames are segments."""
    return Footprint(grid.patches, grid.patches // merge**2, grid.t, grid.frame_patches)


def queues(footprints: Sequence[Footprint], depth: int) -> Iterator[Sequence[Footprint]]:
    """The items in queues of `depth`, in their order of arrival; the last may be shorter."""
    for start in range(0, len(footprints), depth):
        yield footprints[start : start + depth]
