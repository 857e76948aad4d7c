"""Recorded item sizes: JSON lines, one request each; sizes only, never pixels."""

import json
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from math import ceil
from pathlib import Path
from typing import Any

from vitwire_flags.regular_files import append_regular
from vitwire_server.core.capacities import Capacities, CropCapacities, PackedCapacities, TileCapacities
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
        for item in json.loads(line)["items"]:
            yield _footprint(Grid(*map(int, item["grid"])), item.get("footprint"), merge)
    except (ValueError, KeyError, TypeError) as error:
        raise TraceError(f'{where}: expected {{"items": [{{"grid": [t, h, w]}}]}}, got {error!r}') from error


def _footprint(grid: Grid, counts: dict[str, int] | None, merge: int) -> Footprint:
    if counts:
        footprint = Footprint(**{name: int(count) for name, count in counts.items()})
        if min(footprint[:4]) < 1 or min(footprint) < 0:
            raise ValueError(f"expected a footprint of positive counts, got {counts}")
        return footprint
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


def capacities_of(trace: Sequence[Footprint]) -> Capacities:
    """The capacities of a tower with these footprints. Raises TraceError if no kind of tower fits.

    The segments of a packed item have all its patches; a tile is one row, however many patches its segment has.
    """
    if all(item.segments * item.longest == item.patches for item in trace):
        merge = max(-(-item.patches // item.tokens) for item in trace)
        return PackedCapacities(ceil(merge**0.5))
    longest = trace[0].longest
    if all(item.longest == longest for item in trace):
        found = _tiles(trace, longest) or _crops(trace, longest)
        if found:
            return found
    raise TraceError("the trace has items of several models: fit one model at a time")


def _tiles(trace: Sequence[Footprint], longest: int) -> TileCapacities | None:
    """Tile towers: every tile is a segment with the same number of tokens."""
    tile = trace[0].tokens // trace[0].patches
    paired = any(item.crops for item in trace)
    alike = (item.segments == item.patches and item.tokens == tile * item.patches for item in trace)
    pairs = (item.crops == (item.patches if paired else 0) for item in trace)
    return TileCapacities(tile, longest, paired) if all(alike) and all(pairs) else None


def _crops(trace: Sequence[Footprint], longest: int) -> CropCapacities | None:
    """Where an item has one overview and any number of crops, whose tokens follow from two items that differ in them.

    Where none do, an overview and a crop are taken to have as many tokens each.
    """
    fewest, most = (choose(trace, key=lambda item: item.crops) for choose in (min, max))
    between = most.crops - fewest.crops
    crop = (most.tokens - fewest.tokens) // between if between else most.tokens // (1 + most.crops)
    overview = fewest.tokens - fewest.crops * crop
    alike = (
        item.patches == 1 and item.segments == 1 + item.crops and item.tokens == overview + crop * item.crops
        for item in trace
    )
    return CropCapacities(overview, crop, longest) if overview > 0 and crop > 0 and all(alike) else None
