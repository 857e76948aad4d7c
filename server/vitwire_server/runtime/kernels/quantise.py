"""Rows to float8 with a scale each, alone or as the last step of an activation; `norms.py` has that of norms."""

import torch
import triton
from torch import Tensor
from triton import language as tl

from vitwire_server.runtime.kernels.launching import Kernel
from vitwire_server.runtime.kernels.operands import FLOAT8, LARGEST, SMALLEST, Scaled, power_of_two
from vitwire_server.runtime.kernels.rowwise import KINDS, activation

_LARGEST, _SMALLEST = tl.constexpr(LARGEST), tl.constexpr(SMALLEST)
_WIDE = 4096
"""Columns from which a row takes eight warps."""
_MANY_ROWS, _NARROW = 1024, 2048
"""From `_MANY_ROWS` rows on, rows of up to `_NARROW` columns take one warp each."""


def quantise(rows: Tensor) -> Scaled:
    """Rows `(rows, columns)`, each scaled by its largest absolute value."""
    count, columns = rows.shape
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    out = empty_scaled(rows, columns)
    width = power_of_two(columns)
    _quantise[(count,)](rows, rows.stride(0), *out, COUNT=columns, COLUMNS=width, num_warps=warps_of(count, columns))
    return out


def activate_quantise(values: Tensor, kind: str, *, gated: bool = False) -> Scaled:
    """As `rowwise.activate`, with the result in float8; `values` are left as they are."""
    rows, columns = values.shape
    out_columns = columns // 2 if gated else columns
    out = empty_scaled(values, out_columns)
    _activate_quantise[(rows,)](
        values,
        *out,
        columns,
        KIND=KINDS[kind],
        GATED=gated,
        COUNT=out_columns,
        HEAD=(head := power_of_two(out_columns + 1) // 2),
        TAIL=power_of_two(out_columns - head) if out_columns > head else 0,
        num_warps=warps_of(rows, out_columns),
    )
    return out


def empty_scaled(like: Tensor, columns: int) -> Scaled:
    """Room for as many rows as `like` has."""
    values = like.new_empty((len(like), columns), dtype=FLOAT8)
    return Scaled(values, like.new_empty((len(like), 1), dtype=torch.float32))


def warps_of(rows: int, columns: int) -> int:
    """Warps of a program that computes one row."""
    if rows >= _MANY_ROWS and columns <= _NARROW:
        return 1
    return 8 if columns >= _WIDE else 4


@triton.jit
def _scale(largest):
    """The scale of a row."""
    return tl.maximum(largest, _SMALLEST) / _LARGEST


@triton.jit
def store_scaled(values, out_ptr, scales_ptr, row, column, there, COUNT: tl.constexpr) -> None:
    """Store one row; `values` are zero where not `there`. A NaN makes this row NaN and no other."""
    scale = _scale(tl.max(tl.abs(values), 0))
    tl.store(scales_ptr + row, scale)
    tl.store(out_ptr + row * COUNT + column, (values * (1 / scale)).to(out_ptr.dtype.element_ty), mask=there)


@Kernel
@triton.jit
def _quantise(in_ptr, stride, out_ptr, scales_ptr, COUNT: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    there = column < COUNT
    values = tl.load(in_ptr + row * stride + column, mask=there, other=0.0).to(tl.float32)
    store_scaled(values, out_ptr, scales_ptr, row, column, there, COUNT)


@triton.jit
def _activated(in_ptr, column, there, COUNT: tl.constexpr, KIND: tl.constexpr, GATED: tl.constexpr):
    """The activation of some columns of the row at `in_ptr`; zero where not `there`."""
    x = tl.load(in_ptr + column, mask=there, other=0.0).to(tl.float32)
    y = activation(x, KIND)
    if GATED:
        y *= tl.load(in_ptr + COUNT + column, mask=there, other=0.0).to(tl.float32)
    return y


@Kernel
@triton.jit
def _activate_quantise(
    in_ptr,
    out_ptr,
    scales_ptr,
    in_columns,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    COUNT: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
):
    """A row is computed in two parts, as the exponentials of columns that are not there would cost as much."""
    row = tl.program_id(0).to(tl.int64)
    in_ptr += row * in_columns
    out_ptr += row * COUNT
    head = tl.arange(0, HEAD)
    first = _activated(in_ptr, head, head < COUNT, COUNT, KIND, GATED)
    largest = tl.max(tl.abs(first), 0)
    if TAIL:
        tail = HEAD + tl.arange(0, TAIL)
        second = _activated(in_ptr, tail, tail < COUNT, COUNT, KIND, GATED)
        largest = tl.maximum(largest, tl.max(tl.abs(second), 0))
    scale = _scale(largest)
    tl.store(scales_ptr + row, scale)
    tl.store(out_ptr + head, (first * (1 / scale)).to(out_ptr.dtype.element_ty), mask=head < COUNT)
    if TAIL:
        tl.store(out_ptr + tail, (second * (1 / scale)).to(out_ptr.dtype.element_ty), mask=tail < COUNT)
