"""Tables of passes, as the planner writes and kernels read them.

A pass sums pixels along one axis, or only copies them, and lays the result out: as planes of bytes that a later pass
reads, or as rows of the tower's input, with background around it.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Table = npt.NDArray[np.int64]
"""`(passes, fields)`."""


class Axis(IntEnum):
    """Along which a pass sums."""

    ROWS = 0
    COLUMNS = 1
    NONE = 2


class Memory(IntEnum):
    """Where a pass reads, or writes."""

    FRAME = 0
    """The picture, `(H, W, 3)`."""
    SCRATCH = 1
    """Planes `(3, H, W)` between passes."""
    PIXELS = 2
    CROPS = 3


class Taps(NamedTuple):
    """The lengths of an axis before and after, and Pillow's number of the filter: see `rules.filters.taps`."""

    source: int
    target: int
    resample: int


class Field(IntEnum):
    """Columns of a table. Distances in a source are bytes, in a target elements."""

    SOURCE = 0
    """Address of the first pixel; in a program, its offset in `Program.sources`."""
    SOURCE_DOWN = 1
    """To the next row."""
    SOURCE_RIGHT = 2
    SOURCE_CHANNEL = 3
    AXIS = 4
    STARTS = 5
    """Address of the first pixel of each sum, int32; in a program, an index of `Program.taps`, -1 for none."""
    WEIGHTS = 6
    """Address of `(taps, length)` int32; see STARTS."""
    TAPS = 7
    """Pixels of a sum; 0 in a program."""
    LAST = 8
    """Last pixel along the axis."""
    HEIGHT = 9
    """Height of the result."""
    WIDTH = 10
    TOP = 11
    """Top of the result on the canvas; negative if the canvas shows a part of it."""
    LEFT = 12
    DOWN = 13
    """Height of the canvas."""
    ACROSS = 14
    CELL_HEIGHT = 15
    """Height of the part of the canvas that becomes one row."""
    CELL_WIDTH = 16
    MERGE = 17
    """Side of the squares of cells whose rows are adjacent."""
    SQUARES = 18
    """Squares of cells, from left to right."""
    TARGET = 19
    """Address of the first element of the first row; in a program, its offset in `Program.targets`, in elements."""
    TARGET_ROW = 20
    """To the next row."""
    TARGET_CHANNEL = 21
    TARGET_DOWN = 22
    TARGET_RIGHT = 23
    COPIES = 24
    """Frames of a patch that a cell is written to; 1 in a program."""
    TARGET_COPY = 25
    """To the next frame."""
    BACKGROUND = 26
    """Red, green and blue, from the lowest byte on."""
    AFFINE = 27
    """Which scale and offset rows are normalised with; in a program 0 for pixels and 1 for crops."""


@dataclass(frozen=True, slots=True)
class Program:
    """The passes over one picture or frame, with offsets instead of addresses."""

    depth: int
    """Frames of a row."""
    levels: tuple[Table, ...]
    """Passes to scratch; passes of a level read what the levels before it wrote."""
    last: Table
    """Passes to rows of pixels and crops."""
    sources: tuple[tuple[Memory, ...], ...]
    """Sources of the passes of each level, and then of the last."""
    targets: tuple[Memory, ...]
    """Targets of the last passes."""
    taps: tuple[Taps, ...]
    scratch: int
    """Bytes between passes."""
    rows: tuple[int, int]
    """Rows of pixels, and of crops."""
    columns: tuple[int, int]
    """Elements of such a row."""
