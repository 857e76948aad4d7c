"""torch's dense attention, one call per run of equal segments; the reference on every device."""

from itertools import groupby, pairwise

import torch
from torch import Tensor
from torch.nn import functional

from vitwire_server.runtime.attention.interface import Attend


def load() -> Attend:
    """Always available."""
    return segment_sdpa


def segment_sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    boundaries: Tensor,
    longest: int,
    scale: float,
    *,
    key_boundaries: Tensor | None = None,
    most_keys: int = 0,
) -> Tensor:
    """As `Attend`; reads the boundaries on the host."""
    del longest, most_keys
    queries = _lengths(boundaries)
    keys = queries if key_boundaries is None else _lengths(key_boundaries)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    row = key_row = 0
    for (length, count), run in groupby(zip(queries, keys, strict=True)):
        segments = sum(1 for _ in run)
        own, others = slice(row, row + length * segments), slice(key_row, key_row + count * segments)
        if length:
            query = q[own].unflatten(0, (-1, length)).transpose(1, 2)
            key, value = (x[others].unflatten(0, (-1, count)).transpose(1, 2) for x in (k, v))
            attended = functional.scaled_dot_product_attention(query, key, value, scale=scale)
            out[own].unflatten(0, (-1, length)).copy_(attended.transpose(1, 2))
        row, key_row = own.stop, others.stop
    return out


def _lengths(boundaries: Tensor) -> list[int]:
    ends: list[int] = boundaries.tolist()
    return [right - left for left, right in pairwise(ends)]
