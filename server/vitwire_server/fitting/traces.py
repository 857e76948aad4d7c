"""Recorded item sizes: JSON lines, one request each; sizes only, never pixels."""

import json
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from vitwire_server.core.files import append_regular
from vitwire_server.core.grids import Footprint, Grid
from vitwire_server.core.items import Item

_log = logging.getLogger(__name__)
_MERGE = 2
"""Default merge size of readers, for lines without a footprint."""


class TraceError(Exception):
    """A trace is invalid; the message names file and line."""


class TraceWriter:
    """Appends a line per request to a trace. Used on the event loop only.

    Each line is a single append, so servers may share a file. An error is logged once and stops the recording; it
    never fails a request.
    """

    def __init__(self, path: Path) -> None:
        """Raises OSError if the file cannot be opened, or is not a regular one: a write to a pipe may block."""
        self._file = append_regular(path)
        self._start = time.monotonic()

    def record(self, items: Iterable[Item]) -> None:
        """Write the items of one request; does nothing once closed."""
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
        """Stop recording."""
        with suppress(OSError):  # nothing is left to save
            self._file.close()


def _size(item: Item) -> dict[str, Any]:
    """Modality and grid, and the footprint unless readers can compute it from the grid."""
    size: dict[str, Any] = {"modality": item.modality, "grid": item.grid}
    grid, footprint = item.grid, item.footprint
    computable = _divides(grid, _MERGE) and footprint == _packed_footprint(grid, _MERGE)
    return size if computable else size | {"footprint": footprint._asdict()}


def read_trace(path: Path, merge: int) -> list[Footprint]:
    """Footprints of all items of a trace, in order of arrival.

    A line is `{"t": seconds, "items": [{"modality": "image", "grid": [t, h, w]}]}`; the `footprint` of an
    item, if any, replaces the one computed from its grid. Raises TraceError.
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
            recorded = item.get("footprint")
            yield _recorded(recorded) if recorded else _from_grid(Grid(int(t), int(h), int(w)), merge)
    except (ValueError, KeyError, TypeError) as error:
        raise TraceError(f'{where}: expected {{"items": [{{"grid": [t, h, w]}}]}}, got {error!r}') from error


def _recorded(counts: dict[str, int]) -> Footprint:
    footprint = Footprint(**{name: int(count) for name, count in counts.items()})
    if min(footprint.patches, footprint.tokens, footprint.segments, footprint.longest) < 1 or min(footprint) < 0:
        raise ValueError(f"expected a footprint of positive counts, got {counts}")
    return footprint


def _from_grid(grid: Grid, merge: int) -> Footprint:
    if min(grid) < 1 or not _divides(grid, merge):
        raise ValueError(f"expected a grid of positive multiples of the merge size {merge}, got {list(grid)}")
    return _packed_footprint(grid, merge)


def _divides(grid: Grid, merge: int) -> bool:
    return not (grid.h % merge or grid.w % merge)


def _packed_footprint(grid: Grid, merge: int) -> Footprint:
    """The footprint of an item whose frames are segments."""
    return Footprint(grid.patches, grid.patches // merge**2, grid.t, grid.frame_patches)


def queues(footprints: Sequence[Footprint], depth: int) -> Iterator[Sequence[Footprint]]:
    """The items in queues of `depth`, in their order of arrival; the last may be shorter."""
    for start in range(0, len(footprints), depth):
        yield footprints[start : start + depth]
