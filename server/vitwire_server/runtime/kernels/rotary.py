"""Rotary positions of queries and keys."""

from functools import lru_cache

import torch
import triton
from torch import Tensor
from triton import language as tl

from vitwire_server.runtime.kernels.dependent import begin, constants_of, end, is_dependent
from vitwire_server.runtime.kernels.launching import Bound, Kernel
from vitwire_server.runtime.kernels.operands import power_of_two


def rotate(qkv: Tensor, cos: Tensor, sin: Tensor, *, contain: bool = False) -> None:
    """Rotate queries and keys of `qkv (rows, 3, heads, head_dim)` in place, in float32, rounding once.

    `cos` and `sin (rows, head_dim)` are float32; column `i` of a head is paired with `i + head_dim / 2` (Su et al.,
    arXiv 2104.09864, in the layout of GPT-NeoX). `qkv` must be contiguous. `contain` also applies
    `rowwise.contain`.
    """
    rows, _, heads, head_dim = qkv.shape
    launch = _bound(heads, head_dim, contain, is_dependent(qkv.device))
    launch((rows,), qkv, cos, sin, 3 * heads * head_dim)


@lru_cache
def _bound(heads: int, head_dim: int, contain: bool, dependent: bool) -> Bound:
    return _rotate.bound(
        HEADS=heads,
        HALF=head_dim // 2,
        LINES=power_of_two(2 * heads),
        COLUMNS=power_of_two(head_dim // 2),
        CONTAIN=contain,
        num_warps=4,
        **constants_of(dependent),
    )


def rotate_reference(qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The result of `rotate`, with torch operations."""
    turned = qkv[:, :2].float()
    one, two = turned.chunk(2, dim=-1)
    crossed = torch.cat((-two, one), dim=-1)
    turned = turned * cos[:, None, None] + crossed * sin[:, None, None]
    return torch.cat((turned.to(qkv.dtype), qkv[:, 2:]), dim=1)


@Kernel
@triton.jit
def _rotate(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    row_stride,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    LINES: tl.constexpr,
    COLUMNS: tl.constexpr,
    CONTAIN: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    line = tl.arange(0, LINES)
    column = tl.arange(0, COLUMNS)
    angle = row * (2 * HALF) + column
    turned = column < HALF
    begin(DEPENDENT)
    cos_one = tl.load(cos_ptr + angle, mask=turned)[None, :]
    cos_two = tl.load(cos_ptr + angle + HALF, mask=turned)[None, :]
    sin_one = tl.load(sin_ptr + angle, mask=turned)[None, :]
    sin_two = tl.load(sin_ptr + angle + HALF, mask=turned)[None, :]
    there = (line < 2 * HEADS)[:, None] & turned[None, :]
    at = qkv_ptr + row * row_stride + line[:, None] * (2 * HALF) + column[None, :]
    one = tl.load(at, mask=there).to(tl.float32)
    two = tl.load(at + HALF, mask=there).to(tl.float32)
    end(DEPENDENT)
    first = one * cos_one - two * sin_one
    second = two * cos_two + one * sin_two
    if CONTAIN:
        keys = there & (line >= HEADS)[:, None]  # the value is as far after its key as the key is after its query
        value = at + HEADS * 2 * HALF
        value_one = tl.load(value, mask=keys, other=0.0).to(tl.float32)
        value_two = tl.load(value + HALF, mask=keys, other=0.0).to(tl.float32)
        lost_one = (tl.abs(value_one) < float("inf")) == 0
        lost_two = (tl.abs(value_two) < float("inf")) == 0
        tl.store(value, tl.zeros_like(value_one).to(qkv_ptr.dtype.element_ty), mask=keys & lost_one)
        tl.store(value + HALF, tl.zeros_like(value_two).to(qkv_ptr.dtype.element_ty), mask=keys & lost_two)
        lost = (tl.max((lost_one | lost_two).to(tl.int32), 1) > 0)[:, None]
        first = tl.where(lost, float("nan"), first)
        second = tl.where(lost, float("nan"), second)
    tl.store(at, first.to(qkv_ptr.dtype.element_ty), mask=there)
    tl.store(at + HALF, second.to(qkv_ptr.dtype.element_ty), mask=there)
