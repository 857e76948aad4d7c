"""torch's dense attention, one call per run of equal segments; the reference on every device."""

from itertools import groupby, pairwise

import torch
from torch import Tensor
from torch.nn import functional

from vitwire_server.runtime.attention.interface import Attend


def load() -> Attend:
    """Always available."""
    return segment_sdpa


def segment_sdpa(q: Tensor, k: Tensor, v: Tensor, boundaries: Tensor, longest: int, scale: float) -> Tensor:
    """As `Attend`; reads the boundaries on the host."""
    del longest
    ends: list[int] = boundaries.tolist()
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    start = 0
    for length, run in groupby(right - left for left, right in pairwise(ends)):
        stop = start + length * sum(1 for _ in run)
        if length:
            part = slice(start, stop)
            query, key, value = (x[part].unflatten(0, (-1, length)).transpose(1, 2) for x in (q, k, v))
            attended = functional.scaled_dot_product_attention(query, key, value, scale=scale)
            out[part].unflatten(0, (-1, length)).copy_(attended.transpose(1, 2))
        start = stop
    return out
