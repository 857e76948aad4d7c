"""Copies of rows in their output type, with a check that they are finite."""

import triton
from torch import Tensor
from triton import language as tl

_COLUMNS = 2048


def copy_checked(rows: Tensor, out: Tensor, finite: Tensor) -> None:
    """Copy `rows (count, width)` to `out`, converted to its type.

    `finite (count,)` bool says which copies have neither NaN nor infinity. Rows may be strided, their columns not.
    """
    count, width = rows.shape
    if count:
        _copy_checked[(count,)](
            rows, out, finite, width, rows.stride(0), out.stride(0), COLUMNS=_COLUMNS, num_warps=8
        )  # fmt: skip


@triton.jit
def _copy_checked(rows_ptr, out_ptr, finite_ptr, width, row_stride, out_stride, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    lost = tl.zeros([COLUMNS], tl.int32)
    for start in range(0, width, COLUMNS):
        there = start + column < width
        values = tl.load(rows_ptr + row * row_stride + start + column, mask=there, other=0.0)
        copied = values.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + row * out_stride + start + column, copied, mask=there)
        lost |= ((tl.abs(copied.to(tl.float32)) < float("inf")) == 0).to(tl.int32)
    tl.store(finite_ptr + row, tl.max(lost, 0) == 0)
