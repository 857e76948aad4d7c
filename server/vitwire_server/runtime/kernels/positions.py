"""Learned positions, resampled to the grid of an image."""

import torch
import triton
from torch import Tensor
from triton import language as tl


def interpolated(table: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    """The sum of `taps` rows of `table (positions, columns)`, weighted, for each patch: `(patches, columns)`.

    `indices` and `weights (patches, taps)`; summed in float32 and rounded once. All are contiguous.
    """
    patches, taps = indices.shape
    columns = table.shape[1]
    out = torch.empty((patches, columns), dtype=table.dtype, device=table.device)
    _interpolated[(patches,)](
        table, indices, weights, out, columns, TAPS=taps, COLUMNS=triton.next_power_of_2(columns), num_warps=4
    )
    return out


@triton.jit
def _interpolated(table_ptr, indices_ptr, weights_ptr, out_ptr, columns, TAPS: tl.constexpr, COLUMNS: tl.constexpr):
    patch = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    there = column < columns
    sums = tl.zeros([COLUMNS], tl.float32)
    for tap in tl.static_range(TAPS):
        row = tl.load(indices_ptr + patch * TAPS + tap).to(tl.int64)
        weight = tl.load(weights_ptr + patch * TAPS + tap).to(tl.float32)
        sums += weight * tl.load(table_ptr + row * columns + column, mask=there, other=0.0).to(tl.float32)
    tl.store(out_ptr + patch * columns + column, sums.to(out_ptr.dtype.element_ty), mask=there)
