"""Attention within packed segments for Hopper: how `hopper_kernel` is compiled, and what it is launched with."""

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from cutlass import BFloat16, Float32, Int32, cute
from torch import Tensor

from vitwire_server.runtime.devices import architecture
from vitwire_server.runtime.kernels.attention import tiles_of
from vitwire_server.runtime.kernels.dependent import is_dependent
from vitwire_server.runtime.kernels.hopper_kernel import MOST_TURNS, Attention
from vitwire_server.runtime.kernels.launching import cute_cache
from vitwire_server.runtime.kernels.operands import GROUP_ROWS, Segments, fitting_groups, hopper_groups

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
    kernel = _compiled(head_dim, is_dependent(q.device))[groups]
    kernel(q, k, v, out, tiles, scale, programs, together)
    return out


def _groups(segments: Segments, rows: int, heads: int, head_dim: int) -> int:
    return hopper_groups(rows, heads, head_dim, segments.longest, architecture(segments.boundaries.device))


@lru_cache
def _compiled(head_dim: int, dependent: bool) -> dict[int, Any]:
    """The kernels, by their groups of warps. All at once: a compiler would stop the engine while it serves."""
    source = crc32(b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("hopper_*.py"))))
    return {groups: _compile(head_dim, groups, dependent, source) for groups in fitting_groups(head_dim)}


@cute_cache().jit_cache
def _compile(head_dim: int, groups: int, dependent: bool, source: int) -> Callable[..., None]:
    """The kernel for any number of rows, heads and segments, from disk if it is there; `source` is for its name."""
    del source

    def rows() -> object:
        stride = (cute.sym_int64(divisibility=8), cute.sym_int64(divisibility=8), 1)
        shape = (cute.sym_int(), cute.sym_int(), head_dim)
        return cute.runtime.make_fake_tensor(BFloat16, shape, stride=stride, assumed_align=16)

    tiles = cute.runtime.make_fake_tensor(Int32, (cute.sym_int(), 4), stride=(4, 1), assumed_align=16)
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    samples = (*(rows() for _ in range(4)), tiles, Float32(1), Int32(1), Int32(1), stream)
    kernel: Callable[..., None] = cute.compile(
        Attention(head_dim, groups, dependent=dependent), *samples, options="--enable-tvm-ffi"
    )
    return kernel
