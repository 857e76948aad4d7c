"""Programs of passes followed by numpy, in place of the kernel."""

import numpy as np
from numpy.lib.stride_tricks import as_strided

from vitwire_server.preparing.device.passes import program
from vitwire_server.preparing.device.tables import Axis, Field, Memory, Program
from vitwire_server.preparing.rules.filters import PRECISION, taps
from vitwire_server.preparing.rules.recipe import Recipe

Rows = np.ndarray
F = Field


def prepared(picture: np.ndarray, recipe: Recipe) -> tuple[Rows, Rows | None]:
    """The uint8 rows of the pixels and crops of a picture `(H, W, 3)`, or of frames `(F, H, W, 3)`."""
    is_clip = picture.ndim == 4
    frames = picture if is_clip else picture[None]
    made = program(picture.shape[-3:-1], recipe, len(frames) if is_clip else None, recipe.temporal if is_clip else 1)
    groups = -(-len(frames) // made.depth)
    pixels, crops = (
        np.zeros((groups, rows * columns), np.uint8) for rows, columns in zip(made.rows, made.columns, strict=True)
    )
    for slot in range(groups * made.depth):
        group, place = divmod(slot, made.depth)
        follow(made, frames[min(slot, len(frames) - 1)], pixels[group], crops[group], place)
    return pixels.reshape(-1, made.columns[0]), crops.reshape(-1, made.columns[1]) if crops.size else None


def follow(made: Program, frame: np.ndarray, pixels: Rows, crops: Rows, place: int) -> None:
    """Write one frame to a place in each of its rows, which are flat."""
    memories = {
        Memory.FRAME: np.ascontiguousarray(frame).reshape(-1),
        Memory.SCRATCH: np.full(made.scratch, 77, np.uint8),
        Memory.PIXELS: pixels,
        Memory.CROPS: crops,
    }
    for level, table in enumerate(made.levels):
        before = memories[Memory.SCRATCH].copy()  # a pass that read another of its level would read 77
        for row, source in zip(table, made.sources[level], strict=True):
            read = before if source is Memory.SCRATCH else memories[source]
            _write(row, _canvas(row, read, made), memories[Memory.SCRATCH], 0)
    for row, source, target in zip(made.last, made.sources[-1], made.targets, strict=True):
        _write(row, _canvas(row, memories[source], made), memories[target], place)


def _canvas(row: np.ndarray, memory: np.ndarray, made: Program) -> np.ndarray:
    colour = [row[F.BACKGROUND] >> shift & 255 for shift in (0, 8, 16)]
    canvas = np.zeros((row[F.DOWN], row[F.ACROSS], 3), np.uint8) + np.array(colour, np.uint8)
    top, left = max(row[F.TOP], 0), max(row[F.LEFT], 0)
    shown = _result(row, memory, made)[max(-row[F.TOP], 0) :, max(-row[F.LEFT], 0) :]
    room = canvas[top : top + len(shown), left : left + shown.shape[1]]
    room[:] = shown[: len(room), : room.shape[1]]
    return canvas


def _result(row: np.ndarray, memory: np.ndarray, made: Program) -> np.ndarray:
    """`(height, width, 3)`."""
    axis = Axis(row[F.AXIS])
    shape = [row[F.HEIGHT], row[F.WIDTH], 3]
    if axis is not Axis.NONE:
        shape[axis] = row[F.LAST] + 1
    strides = [row[F.SOURCE_DOWN], row[F.SOURCE_RIGHT], row[F.SOURCE_CHANNEL]]
    assert row[F.SOURCE] + np.dot(np.array(shape) - 1, strides) < len(memory), "within the memory"
    source = as_strided(memory[row[F.SOURCE] :], shape, strides)
    if axis is Axis.NONE:
        return source
    starts, weights = taps(*made.taps[row[F.STARTS]])
    moved = np.moveaxis(source, axis, 0).astype(np.int32)
    total = np.full((len(starts), *moved.shape[1:]), 1 << (PRECISION - 1), np.int32)
    for tap in range(weights.shape[1]):
        total += moved[np.minimum(starts + tap, row[F.LAST])] * weights[:, tap].reshape(-1, 1, 1)
    return np.moveaxis(np.clip(total >> PRECISION, 0, 255).astype(np.uint8), 0, axis)


def _write(row: np.ndarray, canvas: np.ndarray, memory: np.ndarray, place: int) -> None:
    merge, height, width = row[F.MERGE], row[F.CELL_HEIGHT], row[F.CELL_WIDTH]
    squares = canvas.reshape(-1, merge, height, row[F.SQUARES], merge, width, 3)
    cells = squares.transpose(0, 3, 1, 4, 2, 5, 6).reshape(-1, height, width, 3)
    strides = [row[F.TARGET_ROW], row[F.TARGET_DOWN], row[F.TARGET_RIGHT], row[F.TARGET_CHANNEL]]
    start = row[F.TARGET] + place * row[F.TARGET_COPY]
    assert start + np.dot(np.array(cells.shape) - 1, strides) < len(memory), "within the memory"
    as_strided(memory[start:], cells.shape, strides)[:] = cells
