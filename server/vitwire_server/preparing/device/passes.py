"""The passes that prepare a picture, planned from its size alone. Each canvas, and each first pass, is made once."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import PIL

from vitwire_server.preparing.device.tables import Axis, Field, Memory, Program, Taps
from vitwire_server.preparing.rules.filters import rows_first
from vitwire_server.preparing.rules.forms import drawing
from vitwire_server.preparing.rules.patches import CHANNELS, Size
from vitwire_server.preparing.rules.recipe import Recipe
from vitwire_server.preparing.rules.sketches import Canvas, Frame, Sketch

_CHOOSES_ORDER = int(PIL.__version__.partition(".")[0]) >= 13
"""True if the installed Pillow, which decoders use, resizes rows first if that saves work."""
_KEPT = 256
"""Programs that are kept: one for each size of pictures."""


@lru_cache(_KEPT)
def program(size: Size, recipe: Recipe, frames: int | None = None, depth: int = 1) -> Program:
    """The passes over an image of this height and width, or over each of `frames` frames of a clip.

    Patches hold `depth` frames, of which the passes write the first. Raises ValueError for what the model's processor
    refuses.
    """
    drawn = drawing(size, recipe, frames)
    builder = _Builder(_sources([*drawn.tiles, *drawn.crops]))
    if recipe.settings.tiling:
        for memory, boxes in ((Memory.PIXELS, drawn.tiles), (Memory.CROPS, drawn.crops)):
            for index, box in enumerate(boxes):
                cells = _Cells(box.size, 1, 1, channels_last=False)
                builder.write(box, cells, memory, index * cells.columns)
        rows = (len(drawn.tiles), len(drawn.crops))
        columns, depth = (_elements(drawn.tiles), _elements(drawn.crops)), 1
    else:
        merge = 1 if recipe.raster else recipe.merge
        cells = _Cells((recipe.patch, recipe.patch), merge, depth, recipe.channels_last)
        builder.write(drawn.tiles[0], cells, Memory.PIXELS)
        rows, columns = (drawn.grid[1] * drawn.grid[2], 0), (cells.columns, 0)
    return builder.program(depth, rows, columns)


def _elements(boxes: Sequence[Sketch]) -> int:
    return CHANNELS * boxes[0].size[0] * boxes[0].size[1] if boxes else 0


def _sources(boxes: Iterable[Sketch]) -> set[Canvas]:
    """The canvases that others are made of: their pixels are kept in scratch."""
    found: set[Canvas] = set()
    for box in boxes:
        of = box.of
        while isinstance(of, Canvas) and isinstance(of.source.of, Canvas):
            of = of.source.of
            found.add(of)
    return found


class _Source(NamedTuple):
    """Pixels in memory, and how a pass sums them."""

    memory: Memory
    offset: int
    strides: tuple[int, int, int]
    """Bytes to the next row, column and channel."""
    level: int
    """Passes before they are there."""
    axis: Axis = Axis.NONE
    taps: Taps | None = None

    def part(self, corner: Size) -> "_Source":
        """The same, from another corner on."""
        offset = self.offset + corner[0] * self.strides[0] + corner[1] * self.strides[1]
        return self._replace(offset=offset)


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
    """Size of the result."""
    corner: Size
    """Corner of the result on the canvas; negative if the canvas shows a part of it."""
    canvas: Size
    background: tuple[int, ...]
    cells: _Cells
    memory: Memory
    """The memory that is written."""
    offset: int
    """Offset of the first element that is written."""


@dataclass(slots=True)
class _Builder:
    """Collects passes."""

    sources: set[Canvas]
    """Canvases that are read as sources."""
    passes: list[list[_Pass]] = field(default_factory=list)
    last: list[_Pass] = field(default_factory=list)
    scratch: int = 0
    stored: dict[Frame | Canvas, _Source] = field(default_factory=dict)
    halfway: dict[Canvas, _Source] = field(default_factory=dict)

    def write(self, box: Sketch, cells: _Cells, memory: Memory, offset: int = 0) -> None:
        """Write a rectangle to rows."""
        if isinstance(box.of, Canvas) and box.of not in self.sources:
            canvas = box.of
            corner = (canvas.corner[0] - box.corner[0], canvas.corner[1] - box.corner[1])
            source, size, background = self._halfway(canvas), canvas.size, canvas.background
        else:
            source, size, corner, background = self._stored(box.of).part(box.corner), box.size, (0, 0), ()
        self.last.append(_Pass(source, size, corner, box.size, background, cells, memory, offset))

    def _stored(self, of: Frame | Canvas) -> _Source:
        """The pixels of a whole frame or canvas, in memory."""
        if of not in self.stored:
            if isinstance(of, Frame):
                self.stored[of] = _Source(Memory.FRAME, 0, (CHANNELS * of.whole[1], CHANNELS, 1), 0)
            else:
                self.stored[of] = self._plane(self._halfway(of), of)
        return self.stored[of]

    def _halfway(self, canvas: Canvas) -> _Source:
        """The source of the last pass over a canvas: its own source, or the result of a first pass."""
        key = canvas._replace(corner=(0, 0), whole=canvas.size, background=())  # wherever it is placed
        if key not in self.halfway:
            stored = self._stored(canvas.source.of).part(canvas.source.corner)
            self.halfway[key] = self._first(stored, key)
        return self.halfway[key]

    def _first(self, stored: _Source, canvas: Canvas) -> _Source:
        before, after = canvas.source.size, canvas.size
        axes = [axis for axis in (Axis.COLUMNS, Axis.ROWS) if before[axis] != after[axis]]
        if not axes:
            return stored
        if len(axes) == 2 and _CHOOSES_ORDER and rows_first(before, after):
            axes.reverse()
        taps = [Taps(before[axis], after[axis], canvas.resample) for axis in axes]
        first = stored._replace(axis=axes[0], taps=taps[0])
        if len(axes) == 1:
            return first
        between = (before[0], after[1]) if axes[0] is Axis.COLUMNS else (after[0], before[1])
        plane = self._plane(first, canvas._replace(size=between, whole=between))
        return plane._replace(axis=axes[1], taps=taps[1])

    def _plane(self, source: _Source, canvas: Canvas) -> _Source:
        """A pass to a canvas in scratch."""
        cells, offset = _Cells(canvas.whole, 1, 1, channels_last=False), self.scratch
        self.scratch += cells.columns
        while len(self.passes) <= source.level:
            self.passes.append([])
        made = _Pass(source, canvas.size, canvas.corner, canvas.whole, canvas.background, cells, Memory.SCRATCH, offset)
        self.passes[source.level].append(made)
        height, width = canvas.whole
        return _Source(Memory.SCRATCH, offset, (width, 1, height * width), source.level + 1)

    def program(self, depth: int, rows: tuple[int, int], columns: tuple[int, int]) -> Program:
        """All passes, as tables."""
        groups = [*self.passes, self.last]
        taps = list({each.source.taps: None for group in groups for each in group if each.source.taps})
        places: dict[Taps | None, int] = {None: -1} | {each: place for place, each in enumerate(taps)}
        *levels, last = (
            np.array([_row(each, places[each.source.taps]) for each in group], np.int64) for group in groups
        )
        return Program(
            depth,
            tuple(levels),
            last,
            tuple(tuple(each.source.memory for each in group) for group in groups),
            tuple(each.memory for each in self.last),
            tuple(taps),
            self.scratch,
            rows,
            columns,
        )


def _row(made: _Pass, taps: int) -> list[int]:
    source, cells = made.source, made.cells
    down, right, channel = source.strides
    to_channel, to_below, to_right, to_frame = cells.strides
    red, green, blue = made.background or (0, 0, 0)
    row = {
        Field.SOURCE: source.offset,
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
        Field.TARGET: made.offset,
        Field.TARGET_ROW: cells.columns,
        Field.TARGET_CHANNEL: to_channel,
        Field.TARGET_DOWN: to_below,
        Field.TARGET_RIGHT: to_right,
        Field.COPIES: 1,
        Field.TARGET_COPY: to_frame,
        Field.BACKGROUND: red | green << 8 | blue << 16,
        Field.AFFINE: int(made.memory is Memory.CROPS),
    }
    return [row[name] for name in Field]
