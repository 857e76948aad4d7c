"""Attention within packed segments for Hopper: what `hopper_kernel` is launched with."""

import torch
from torch import Tensor

from vitwire_server.runtime.devices import architecture
from vitwire_server.runtime.kernels.attention import tiles_of
from vitwire_server.runtime.kernels.dependent import is_dependent
from vitwire_server.runtime.kernels.hopper_kernel import MOST_TURNS, compiled
from vitwire_server.runtime.kernels.operands import GROUP_ROWS, Segments, hopper_groups

_SHORT = 1024
"""Up to this segment length, programs take turns with tiles; tiles of empty slots come last and are skipped at once.
Tiles of longer segments differ more, and the device gives each to the multiprocessor that is free first."""
_NEIGHBOURS = 24
"""Tiles of long segments that follow one another for each head: the cache may not hold all heads."""


def hopper_tiles(segments: Segments, rows: int, heads: int, head_dim: int) -> Tensor:
    """The tiles for `hopper_attention`, as `segment_tiles` returns them."""
    return tiles_of(segments, rows, GROUP_ROWS * _groups(segments, rows, heads, head_dim))


def hopper_attention(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float, tiles: Tensor | None = None
) -> Tensor:
    """As `Attend`, of bfloat16 and with a positive `scale`. Heads are contiguous and begin at multiples of 16 bytes.

    `tiles` come from `hopper_tiles`.
    """
    rows, heads, head_dim = q.shape
    out = torch.empty((rows, heads, head_dim), dtype=q.dtype, device=q.device)
    tiles = hopper_tiles(segments, rows, heads, head_dim) if tiles is None else tiles
    groups = _groups(segments, rows, heads, head_dim)
    programs, together = len(tiles) * heads, _NEIGHBOURS
    if segments.longest <= _SHORT:
        programs, together = max(min(programs, architecture(q.device).processors), -(-programs // MOST_TURNS)), 1
    kernel = compiled(head_dim, is_dependent(q.device))[groups]
    kernel(q, k, v, out, tiles, scale, programs, together)
    return out


def _groups(segments: Segments, rows: int, heads: int, head_dim: int) -> int:
    return hopper_groups(rows, heads, head_dim, segments.longest, architecture(segments.boundaries.device))
