"""The kernel that makes RGB of the planes of NV12, with the integers of `colours`."""

import triton
from torch import Tensor
from triton import language as tl

_BLOCK = 1024
"""Pixels of a row that one program makes."""
_ANY = "luma_ptr chroma_ptr target_ptr width below below_chroma bright red blue green_u green_v offset"
"""Arguments whose values choose no other kernel, as none can be compiled during jobs."""


def convert(luma: Tensor, chroma: Tensor, factors: tuple[int, ...], target: Tensor) -> None:
    """Write `target (H, W, 3)` from samples `(H, W)` and `(H / 2, ceil(W / 2), 2)`; all uint8, and their rows dense.

    factors: of luma, red, blue, green by U and green by V, and the offset.
    """
    height, width = luma.shape
    _convert[(height, triton.cdiv(width, _BLOCK))](
        luma, chroma, target, width, luma.stride(0), chroma.stride(0), *factors, BLOCK=_BLOCK
    )


@triton.jit
def _clipped(samples):
    return tl.minimum(tl.maximum(samples, 0), 255).to(tl.uint8)


@triton.jit(do_not_specialize=_ANY.split())
def _convert(
    luma_ptr, chroma_ptr, target_ptr, width, below, below_chroma, bright, red, blue, green_u, green_v, offset,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = column < width
    pair_ptr = chroma_ptr + (row // 2) * below_chroma + (column // 2) * 2
    luma = (tl.load(luma_ptr + row * below + column, mask=there, other=0).to(tl.int32) << 3) - offset
    u = (tl.load(pair_ptr, mask=there, other=0).to(tl.int32) - 128) << 3
    v = (tl.load(pair_ptr + 1, mask=there, other=0).to(tl.int32) - 128) << 3
    grey = (luma * bright) >> 16
    at = target_ptr + (row * width + column) * 3
    tl.store(at, _clipped(grey + ((v * red) >> 16)), mask=there)
    tl.store(at + 1, _clipped(grey + ((u * green_u) >> 16) + ((v * green_v) >> 16)), mask=there)
    tl.store(at + 2, _clipped(grey + ((u * blue) >> 16)), mask=there)
