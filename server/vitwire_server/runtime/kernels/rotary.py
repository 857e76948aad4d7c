"""Rotary positions of queries and keys."""

from functools import lru_cache
from math import gcd

import triton
from torch import Tensor
from triton import language as tl

from vitwire_server.runtime.kernels.dependent import begin, constants_of, end, is_dependent
from vitwire_server.runtime.kernels.launching import Bound, Kernel

_VECTORS, _WARPS = 256, 8
"""Vectors and warps of a program: each thread has one vector of queries, of keys and of values."""
_WIDEST = 8
"""Numbers of a vector, at most."""


def rotate(qkv: Tensor, cos: Tensor, sin: Tensor, *, contain: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of `qkv (rows, 3, heads, head_dim)`, the first two rotated in float32 and rounded once.

    `cos` and `sin (rows, head_dim)` are float32; column `i` of a head is paired with `i + head_dim / 2` (Su et al.,
    arXiv 2104.09864, in the layout of GPT-NeoX). `qkv` must be contiguous, and is overwritten. `contain` keeps NaN and
    infinity in their segment, as `rowwise.contain` does.
    """
    rows, _, heads, head_dim = qkv.shape
    vector = gcd(head_dim // 2, _WIDEST)
    launch = _bound(heads, head_dim, vector, contain, is_dependent(qkv.device))
    launch((triton.cdiv(rows * heads, _VECTORS * vector // head_dim),), qkv, cos, sin, rows * heads)
    return qkv[:, 0], qkv[:, 1], qkv[:, 2]


@lru_cache
def _bound(heads: int, head_dim: int, vector: int, contain: bool, dependent: bool) -> Bound:
    return _rotate.bound(
        HEADS=heads,
        HEAD_DIM=head_dim,
        VECTORS=_VECTORS,
        VECTOR=vector,
        CONTAIN=contain,
        num_warps=_WARPS,
        **constants_of(dependent),
    )


@Kernel
@triton.jit(do_not_specialize=["heads"])
def _rotate(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    heads,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VECTORS: tl.constexpr,
    VECTOR: tl.constexpr,
    CONTAIN: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """The whole heads, of any rows, that `VECTORS` vectors hold."""
    plane = HEADS * HEAD_DIM
    each = HEAD_DIM // VECTOR
    vector = tl.arange(0, VECTORS)[:, None]
    head = tl.program_id(0) * (VECTORS // each) + vector // each
    there = (vector // each < VECTORS // each) & (head < heads)
    row = (head // HEADS).to(tl.int64)
    place = vector % each
    number = tl.arange(0, VECTOR)[None, :]
    column = place * VECTOR + number
    at = qkv_ptr + row * (3 * plane) + head % HEADS * HEAD_DIM
    paired = at + (place + each // 2) % each * VECTOR + number
    at += column
    begin(DEPENDENT)
    q = tl.load(at, mask=there).to(tl.float32)
    k = tl.load(at + plane, mask=there).to(tl.float32)
    q_paired = tl.load(paired, mask=there).to(tl.float32)
    k_paired = tl.load(paired + plane, mask=there).to(tl.float32)
    cos = tl.load(cos_ptr + row * HEAD_DIM + column, mask=there)
    sin = tl.load(sin_ptr + row * HEAD_DIM + column, mask=there)
    if CONTAIN:
        v = tl.load(at + 2 * plane, mask=there, other=0.0)
    end(DEPENDENT)
    tl.debug_barrier()  # other threads have read what this one overwrites
    sin = tl.where(place < each // 2, -sin, sin)
    q = q * cos + q_paired * sin
    k = k * cos + k_paired * sin
    if CONTAIN:
        finite = tl.abs(v.to(tl.float32)) < float("inf")
        lost = tl.max((finite == 0).to(tl.int32), 1, keep_dims=True) > 0
        tl.store(at + 2 * plane, tl.where(finite, v, 0.0).to(qkv_ptr.dtype.element_ty), mask=there & lost)
        k = tl.where(lost, float("nan"), k)
    tl.store(at, q.to(qkv_ptr.dtype.element_ty), mask=there)
    tl.store(at + plane, k.to(qkv_ptr.dtype.element_ty), mask=there)
