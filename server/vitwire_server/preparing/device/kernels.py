"""The kernel that follows a table of passes: sums of weighted bytes, or copies, laid out as the table says."""

from collections.abc import Mapping

import torch
import triton
from torch import Tensor
from triton import language as tl

from vitwire_server.preparing.device.tables import Field
from vitwire_server.preparing.rules.filters import PRECISION

_BLOCK = (8, 64)
"""Rows and columns of a canvas that one program makes, in all three channels."""
_TYPES: Mapping[torch.dtype, tl.dtype] = {
    torch.uint8: tl.uint8,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
}
_FIELDS, _PRECISION, _HALF = map(tl.constexpr, (len(Field), PRECISION, 1 << (PRECISION - 1)))
(
    _SOURCE, _SOURCE_DOWN, _SOURCE_RIGHT, _SOURCE_CHANNEL, _AXIS, _STARTS, _WEIGHTS, _TAPS, _LAST, _HEIGHT, _WIDTH,
    _TOP, _LEFT, _DOWN, _ACROSS, _CELL_HEIGHT, _CELL_WIDTH, _MERGE, _SQUARES, _TARGET, _TARGET_ROW, _TARGET_CHANNEL,
    _TARGET_DOWN, _TARGET_RIGHT, _COPIES, _TARGET_COPY, _BACKGROUND, _AFFINE,
) = (tl.constexpr(int(field)) for field in Field)  # fmt: skip


def follow(table: Tensor, largest: tuple[int, int], dtype: torch.dtype, affine: Tensor) -> None:
    """Run the passes of `table (passes, fields)` int64, with addresses, on its device.

    `largest` is the most rows and the most columns of a canvas; targets are of `dtype`. Unless that is uint8, results
    are multiplied by the scale and added to the offset that the table names in `affine (pairs, 2, 3)` float32; both
    operations are rounded, as torch rounds them, before the result is rounded to `dtype`.
    """
    blocks = triton.cdiv(largest[0], _BLOCK[0]) * triton.cdiv(largest[1], _BLOCK[1])
    _follow[(len(table) * blocks,)](
        table, affine, blocks, TYPE=_TYPES[dtype], NORMALISE=dtype is not torch.uint8,
        ROWS=_BLOCK[0], COLUMNS=_BLOCK[1], num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit
def _field(pass_ptr, FIELD: tl.constexpr):
    """A small number of the table."""
    return tl.load(pass_ptr + FIELD).to(tl.int32)


@triton.jit
def _bytes(source_ptr, at, channel, there):
    """Three channels, as int32."""
    return (
        tl.load(source_ptr + at, mask=there, other=0).to(tl.int32),
        tl.load(source_ptr + at + channel, mask=there, other=0).to(tl.int32),
        tl.load(source_ptr + at + 2 * channel, mask=there, other=0).to(tl.int32),
    )


@triton.jit
def _rounded(total):
    """A sum of weighted bytes, shifted and clipped to a byte."""
    return tl.minimum(tl.maximum(total >> _PRECISION, 0), 255)


@triton.jit
def _down(
    source_ptr, start, last, below, at_x, channel, weights_ptr, height, taps, tall, inside,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sums of rows, with one weight for each row of the result."""
    red = tl.full([ROWS, COLUMNS], _HALF, tl.int32)
    green, blue = red, red
    for tap in range(taps):
        weight = tl.load(weights_ptr + tap * height, mask=tall, other=0)[:, None]
        at = (tl.minimum(start + tap, last) * below)[:, None] + at_x[None, :]
        first, second, third = _bytes(source_ptr, at, channel, inside)
        red += weight * first
        green += weight * second
        blue += weight * third
    return _rounded(red), _rounded(green), _rounded(blue)


@triton.jit
def _across(
    source_ptr, start, last, right, at_y, channel, weights_ptr, width, taps, wide, inside,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sums of columns, with one weight for each column of the result."""
    red = tl.full([ROWS, COLUMNS], _HALF, tl.int32)
    green, blue = red, red
    for tap in range(taps):
        weight = tl.load(weights_ptr + tap * width, mask=wide, other=0)[None, :]
        at = at_y[:, None] + (tl.minimum(start + tap, last) * right)[None, :]
        first, second, third = _bytes(source_ptr, at, channel, inside)
        red += weight * first
        green += weight * second
        blue += weight * third
    return _rounded(red), _rounded(green), _rounded(blue)


@triton.jit
def _cell(place, length, merge):
    """For places along an axis: the square of cells, the cell in it, and the place in that."""
    cell = place // length
    square = cell // merge
    return square, cell - square * merge, place - cell * length


@triton.jit
def _write(
    values, channel: tl.constexpr, target_ptr, at, there, inside, pass_ptr, affine_ptr,
    TYPE: tl.constexpr, NORMALISE: tl.constexpr,
):  # fmt: skip
    """One channel, to each copy."""
    background = (_field(pass_ptr, _BACKGROUND) >> (8 * channel)) & 255
    values = tl.where(inside, values, background)
    if NORMALISE:
        pair_ptr = affine_ptr + tl.load(pass_ptr + _AFFINE) * 6 + channel
        scaled = values.to(tl.float32) * tl.load(pair_ptr)
        made = (scaled + tl.load(pair_ptr + 3)).to(TYPE)
    else:
        made = values.to(TYPE)
    at += channel * tl.load(pass_ptr + _TARGET_CHANNEL)
    step = tl.load(pass_ptr + _TARGET_COPY)
    for copy in range(_field(pass_ptr, _COPIES)):
        tl.store(target_ptr + at + copy * step, made, mask=there)


@triton.jit(do_not_specialize=["most"])
def _follow(
    table_ptr, affine_ptr, most, TYPE: tl.constexpr, NORMALISE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Each pass has `most` programs in turn, of which those beyond its canvas end at once."""
    pass_ptr = table_ptr + (tl.program_id(0) // most) * _FIELDS
    down, across = _field(pass_ptr, _DOWN), _field(pass_ptr, _ACROSS)
    blocks = tl.cdiv(across, COLUMNS)
    block = tl.program_id(0) % most
    if block >= tl.cdiv(down, ROWS) * blocks:
        return
    row = (block // blocks) * ROWS + tl.arange(0, ROWS)
    column = (block % blocks) * COLUMNS + tl.arange(0, COLUMNS)

    # Places on the result: bytes are read only there.
    height, width = _field(pass_ptr, _HEIGHT), _field(pass_ptr, _WIDTH)
    y, x = row - _field(pass_ptr, _TOP), column - _field(pass_ptr, _LEFT)
    tall, wide = (row < down) & (y >= 0) & (y < height), (column < across) & (x >= 0) & (x < width)
    inside = tall[:, None] & wide[None, :]

    source_ptr = tl.load(pass_ptr + _SOURCE).to(tl.pointer_type(tl.uint8))
    below, right = _field(pass_ptr, _SOURCE_DOWN), _field(pass_ptr, _SOURCE_RIGHT)
    channel = _field(pass_ptr, _SOURCE_CHANNEL)
    starts_ptr = tl.load(pass_ptr + _STARTS).to(tl.pointer_type(tl.int32))
    weights_ptr = tl.load(pass_ptr + _WEIGHTS).to(tl.pointer_type(tl.int32))
    taps, last, axis = _field(pass_ptr, _TAPS), _field(pass_ptr, _LAST), _field(pass_ptr, _AXIS)
    if axis == 0:
        top = tl.load(starts_ptr + y, mask=tall, other=0)
        red, green, blue = _down(
            source_ptr, top, last, below, x * right, channel, weights_ptr + y, height, taps, tall, inside, ROWS, COLUMNS
        )
    elif axis == 1:
        left = tl.load(starts_ptr + x, mask=wide, other=0)
        red, green, blue = _across(
            source_ptr, left, last, right, y * below, channel, weights_ptr + x, width, taps, wide, inside, ROWS, COLUMNS
        )
    else:
        red, green, blue = _bytes(source_ptr, (y * below)[:, None] + (x * right)[None, :], channel, inside)

    merge, squares = _field(pass_ptr, _MERGE), _field(pass_ptr, _SQUARES)
    square_y, cell_y, in_y = _cell(row, _field(pass_ptr, _CELL_HEIGHT), merge)
    square_x, cell_x, in_x = _cell(column, _field(pass_ptr, _CELL_WIDTH), merge)
    to_row = tl.load(pass_ptr + _TARGET_ROW)
    at_y = ((square_y * squares * merge + cell_y) * merge) * to_row + in_y * tl.load(pass_ptr + _TARGET_DOWN)
    at_x = (square_x * merge * merge + cell_x) * to_row + in_x * tl.load(pass_ptr + _TARGET_RIGHT)
    at = at_y[:, None] + at_x[None, :]
    there = (row < down)[:, None] & (column < across)[None, :]
    target_ptr = tl.load(pass_ptr + _TARGET).to(tl.pointer_type(TYPE))
    _write(red, 0, target_ptr, at, there, inside, pass_ptr, affine_ptr, TYPE, NORMALISE)
    _write(green, 1, target_ptr, at, there, inside, pass_ptr, affine_ptr, TYPE, NORMALISE)
    _write(blue, 2, target_ptr, at, there, inside, pass_ptr, affine_ptr, TYPE, NORMALISE)
