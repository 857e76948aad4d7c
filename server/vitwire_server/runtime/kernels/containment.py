"""Containment of NaN and infinity within their segment."""

import torch
import triton
from torch import Tensor
from triton import language as tl


def contain(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values `(rows, heads, head_dim)` with which NaN and infinity stay in their segment.

    Flash attention reads whole blocks of keys, including those of the next segment, and masks their weights to 0; but
    0 * NaN is NaN. Here a value that is not finite becomes 0 and its key NaN: queries of its segment get NaN from their
    scores, while scores of other segments are masked before they are used. Heads of a row must be contiguous; rows
    may be strided. Both results are new and contiguous.
    """
    rows, heads, head_dim = k.shape
    assert k.stride(1) == v.stride(1) == head_dim
    keys, values = (torch.empty((rows, heads, head_dim), dtype=each.dtype, device=each.device) for each in (k, v))
    _contain[(rows,)](
        k,
        v,
        keys,
        values,
        k.stride(0),
        v.stride(0),
        HEADS=heads,
        HEAD_DIM=head_dim,
        LINES=triton.next_power_of_2(heads),
        COLUMNS=triton.next_power_of_2(head_dim),
        num_warps=4,
    )
    return keys, values


@triton.jit
def _contain(
    k_ptr,
    v_ptr,
    keys_ptr,
    values_ptr,
    k_row,
    v_row,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    LINES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    line = tl.arange(0, LINES)
    column = tl.arange(0, COLUMNS)
    there = (line < HEADS)[:, None] & (column < HEAD_DIM)[None, :]
    at = line[:, None] * HEAD_DIM + column[None, :]
    out = row * (HEADS * HEAD_DIM) + at
    k = tl.load(k_ptr + row * k_row + at, mask=there, other=0.0)
    v = tl.load(v_ptr + row * v_row + at, mask=there, other=0.0)
    lost = (tl.abs(v.to(tl.float32)) < float("inf")) == 0
    key_lost = (tl.max(lost.to(tl.int32), 1) > 0)[:, None]
    tl.store(keys_ptr + out, tl.where(key_lost, float("nan"), k).to(keys_ptr.dtype.element_ty), mask=there)
    tl.store(values_ptr + out, tl.where(lost, 0.0, v).to(values_ptr.dtype.element_ty), mask=there)
