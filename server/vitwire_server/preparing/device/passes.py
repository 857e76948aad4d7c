"""The passes that prepare a picture, planned from its size alone. Each canvas, and each first pass, is made once."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import PIL

from vitwire_server.preparing.device.tables import Axis, Field, Memory, Program, Table, Taps
from vitwire_server.preparing.rules.filters import rows_first
from vitwire_server.preparing.rules.forms import drawing
from vitwire_server.preparing.rules.patches import CHANNELS, Grid, Size
from vitwire_server.preparing.rules.recipe import Recipe
from vitwire_server.preparing.rules.sketches import Canvas, Drawing, Frame, Sketch

_CHOOSES_ORDER = int(PIL.__version__.partition(".")[0]) >= 13
"""Whether the installed Pillow, which decoders use, resizes rows first where that saves work."""
_KEPT = 256
"""Programs that are kept: one for each size of pictures."""


@lru_cache(_KEPT)
def program(size: Size, recipe: Recipe, frames: int | None = None, depth: int = 1) -> Program:
    """The passes over an image of this height and width, or over each of `frames` frames of a clip.

    Patches hold `depth` frames, of which the passes write the first. Raises ValueError for what the model's processor
    refuses.
    """
    drawn = drawing(size, recipe, frames)
    builder = _Builder(_sources(drawn))
    if recipe.settings.tiling:
        for memory, boxes in ((Memory.PIXELS, drawn.tiles), (Memory.CROPS, drawn.crops)):
            for index, box in enumerate(boxes):
                cells = _Cells(box.size, 1, 1, channels_last=False)
                builder.write(box, cells, _Target(memory, index * cells.columns))
        rows = (len(drawn.tiles), len(drawn.crops))
        columns, depth = (_elements(drawn.tiles), _elements(drawn.crops)), 1
    else:
        merge = 1 if recipe.raster else recipe.merge
        cells = _Cells((recipe.patch, recipe.patch), merge, depth, recipe.channels_last)
        builder.write(drawn.tiles[0], cells, _Target(Memory.PIXELS, 0))
        rows, columns = (drawn.grid[1] * drawn.grid[2], 0), (cells.columns, 0)
    return builder.program(drawn.grid, depth, rows, columns)


def _elements(boxes: Sequence[Sketch]) -> int:
    return CHANNELS * boxes[0].size[0] * boxes[0].size[1] if boxes else 0


def _sources(drawn: Drawing) -> set[Canvas]:
    """The canvases that others are made of: their pixels are kept in scratch."""
    found: set[Canvas] = set()

    def visit(box: Sketch) -> None:
        if isinstance(box.of, Canvas):
            source = box.of.source
            if isinstance(source.of, Canvas):
                found.add(source.of)
            visit(source)

    for box in (*drawn.tiles, *drawn.crops):
        visit(box)
    return found


class _Stored(NamedTuple):
    """Pixels in memory."""

    memory: Memory
    offset: int
    strides: tuple[int, int, int]
    """Bytes to the next row, column and channel."""
    level: int
    """Passes before they are there."""

    def part(self, corner: Size) -> "_Stored":
        """The same, from another corner on."""
        offset = self.offset + corner[0] * self.strides[0] + corner[1] * self.strides[1]
        return self._replace(offset=offset)


class _Source(NamedTuple):
    """What the last pass of a canvas reads, and how it sums it."""

    stored: _Stored
    axis: Axis
    taps: Taps | None


class _Target(NamedTuple):
    memory: Memory
    offset: int
    """In elements."""


class _Cells(NamedTuple):
    """The parts of a canvas that become rows, and the order of a row: (C, T, h, w), or (T, h, w, C)."""

    size: Size
    merge: int
    depth: int
    channels_last: bool

    @property
    def columns(self) -> int:
        """Elements of a row."""
        return CHANNELS * self.depth * self.size[0] * self.size[1]

    @property
    def strides(self) -> tuple[int, int, int, int]:
        """Elements to the next channel, pixel below, pixel to the right, and frame."""
        height, width = self.size
        if self.channels_last:
            return 1, CHANNELS * width, CHANNELS, CHANNELS * height * width
        return self.depth * height * width, width, 1, height * width


class _Pass(NamedTuple):
    source: _Source
    size: Size
    """Of the result."""
    corner: Size
    """Of the result on the canvas; negative if the canvas shows a part of it."""
    canvas: Size
    background: tuple[int, ...]
    cells: _Cells
    target: _Target


@dataclass(slots=True)
class _Builder:
    """Collects passes."""

    sources: set[Canvas]
    """Canvases that are read as sources."""
    passes: list[list[_Pass]] = field(default_factory=list)
    last: list[_Pass] = field(default_factory=list)
    scratch: int = 0
    stored: dict[Frame | Canvas, _Stored] = field(default_factory=dict)
    halfway: dict[Canvas, _Source] = field(default_factory=dict)

    def write(self, box: Sketch, cells: _Cells, target: _Target) -> None:
        """Write a rectangle to rows."""
        if isinstance(box.of, Canvas) and box.of not in self.sources:
            canvas = box.of
            corner = (canvas.corner[0] - box.corner[0], canvas.corner[1] - box.corner[1])
            made = _Pass(self._halfway(canvas), canvas.size, corner, box.size, canvas.background, cells, target)
        else:
            source = _Source(self._stored(box.of).part(box.corner), Axis.NONE, None)
            made = _Pass(source, box.size, (0, 0), box.size, (), cells, target)
        self.last.append(made)

    def _stored(self, of: Frame | Canvas) -> _Stored:
        """The pixels of a whole frame or canvas, in memory."""
        if of not in self.stored:
            if isinstance(of, Frame):
                self.stored[of] = _Stored(Memory.FRAME, 0, (CHANNELS * of.whole[1], CHANNELS, 1), 0)
            else:
                source = self._halfway(of)
                self.stored[of] = self._plane(source, of.size, of.corner, of.whole, of.background)
        return self.stored[of]

    def _halfway(self, canvas: Canvas) -> _Source:
        """What the last pass over a canvas reads: its source, or that after a first pass."""
        source = canvas.source
        key = canvas._replace(corner=(0, 0), whole=canvas.size, background=())  # wherever it is placed
        if key not in self.halfway:
            stored = self._stored(source.of).part(source.corner)
            self.halfway[key] = self._first(stored, source.size, canvas.size, canvas.resample)
        return self.halfway[key]

    def _first(self, stored: _Stored, before: Size, after: Size, resample: int) -> _Source:
        axes = [axis for axis in (Axis.COLUMNS, Axis.ROWS) if before[axis] != after[axis]]
        if not axes:
            return _Source(stored, Axis.NONE, None)
        taps = {axis: Taps(before[axis], after[axis], resample) for axis in axes}
        if len(axes) == 1:
            return _Source(stored, axes[0], taps[axes[0]])
        if _CHOOSES_ORDER and rows_first(before, after):
            axes.reverse()
        between = (before[0], after[1]) if axes[0] is Axis.COLUMNS else (after[0], before[1])
        plane = self._plane(_Source(stored, axes[0], taps[axes[0]]), between, (0, 0), between, ())
        return _Source(plane, axes[1], taps[axes[1]])

    def _plane(self, source: _Source, size: Size, corner: Size, canvas: Size, background: tuple[int, ...]) -> _Stored:
        """A pass to a canvas in scratch."""
        cells, target = _Cells(canvas, 1, 1, channels_last=False), _Target(Memory.SCRATCH, self.scratch)
        self.scratch += cells.columns
        level = source.stored.level
        while len(self.passes) <= level:
            self.passes.append([])
        self.passes[level].append(_Pass(source, size, corner, canvas, background, cells, target))
        return _Stored(Memory.SCRATCH, target.offset, (canvas[1], 1, canvas[0] * canvas[1]), level + 1)

    def program(self, grid: Grid, depth: int, rows: tuple[int, int], columns: tuple[int, int]) -> Program:
        """All passes, as tables."""
        groups = [*self.passes, self.last]
        taps = list({each.source.taps: None for group in groups for each in group if each.source.taps})
        index = {each: place for place, each in enumerate(taps)}
        *levels, last = (_table(group, index) for group in groups)
        return Program(
            grid,
            depth,
            tuple(levels),
            last,
            tuple(tuple(each.source.stored.memory for each in group) for group in groups),
            tuple(each.target.memory for each in self.last),
            tuple(taps),
            self.scratch,
            rows,
            columns,
        )


def _table(passes: Iterable[_Pass], taps: dict[Taps, int]) -> Table:
    rows = [_row(each, -1 if each.source.taps is None else taps[each.source.taps]) for each in passes]
    return np.array([[row[name] for name in Field] for row in rows], np.int64)


def _row(made: _Pass, taps: int) -> dict[Field, int]:
    source, cells = made.source, made.cells
    down, right, channel = source.stored.strides
    to_channel, to_below, to_right, to_frame = cells.strides
    red, green, blue = made.background or (0, 0, 0)
    return {
        Field.SOURCE: source.stored.offset,
        Field.SOURCE_DOWN: down,
        Field.SOURCE_RIGHT: right,
        Field.SOURCE_CHANNEL: channel,
        Field.AXIS: source.axis,
        Field.STARTS: taps,
        Field.WEIGHTS: taps,
        Field.TAPS: 0,
        Field.LAST: source.taps.source - 1 if source.taps else 0,
        Field.HEIGHT: made.size[0],
        Field.WIDTH: made.size[1],
        Field.TOP: made.corner[0],
        Field.LEFT: made.corner[1],
        Field.DOWN: made.canvas[0],
        Field.ACROSS: made.canvas[1],
        Field.CELL_HEIGHT: cells.size[0],
        Field.CELL_WIDTH: cells.size[1],
        Field.MERGE: cells.merge,
        Field.SQUARES: made.canvas[1] // (cells.size[1] * cells.merge),
        Field.TARGET: made.target.offset,
        Field.TARGET_ROW: cells.columns,
        Field.TARGET_CHANNEL: to_channel,
        Field.TARGET_DOWN: to_below,
        Field.TARGET_RIGHT: to_right,
        Field.COPIES: 1,
        Field.TARGET_COPY: to_frame,
        Field.BACKGROUND: red | green << 8 | blue << 16,
        Field.AFFINE: int(made.target.memory is Memory.CROPS),
    }
