"""Operands of kernels: packed segments, and the tiles of attention. Imports no Triton."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, TypeAlias

from torch import Tensor

from vitwire_server.runtime.devices import Architecture

_FEW_ROWS = 64
_MANY_ROWS = 128
_PROGRAMS = 2
"""Programs of `_MANY_ROWS` for each multiprocessor that keep a device busy."""
_STAGES_AND_KEYS = ((3, 64), (2, 64), (2, 32))
"""Stages and keys of a block in an attention program, the fastest first."""
_BARRIER_BYTES = 1024
_HOPPER = 9
GROUP_ROWS = 64
"""Queries of a group of four warps on Hopper."""
_MOST_COLUMNS = 96
"""Columns of the widest heads that fit in the registers of three groups."""
_ROUNDS = {3: 1.0, 2: 0.9, 1: 0.82}
"""How long a tile of this many groups takes, relative to the largest: 4096 patches on an H200."""
_NARROWEST = 16
"""Columns of a matrix product at least."""


class Segments(NamedTuple):
    """Packed rows, which attend only to rows of the same segment.

    A segment may have other numbers of queries and of keys; one without keys has no queries either.
    """

    boundaries: Tensor
    """`(segments + 1,)` int32; the first is 0, the last at most the number of rows."""
    longest: int
    """Rows of the longest segment, or more."""
    key_boundaries: Tensor | None = None
    """As `boundaries`, for keys; None if they are the same."""
    most_keys: int = 0
    """Keys of the segment with most of them, or more; with `key_boundaries`."""

    def keys(self) -> tuple[Tensor, int]:
        """The boundaries of keys, and the longest segment of them."""
        return (self.boundaries, self.longest) if self.key_boundaries is None else (self.key_boundaries, self.most_keys)


Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor, Segments, float], Tensor]
"""Attention of `q, k, v (rows, heads, head_dim)` within segments, whose scores are multiplied by the last argument.

Returns rows like `q`; those behind the last boundary are undefined."""


@dataclass(frozen=True, slots=True)
class Tiled:
    """Attention, as `Attend`, by a kernel whose tiles may be kept for all layers of a forward."""

    tiles: Callable[[Segments, int, int, int], Tensor]
    """Divides segments into tiles, for rows of this many heads of this many columns."""
    attend: Callable[[Tensor, Tensor, Tensor, Segments, float, Tensor | None], Tensor]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> Tensor:
        """As `Attend`; finds the tiles itself."""
        return self.attend(q, k, v, segments, scale, None)


def power_of_two(least: int) -> int:
    """The smallest power of two from `least` on; Triton's function takes microseconds."""
    return 1 << (least - 1).bit_length()


def fitting_groups(head_dim: int) -> list[int]:
    """Numbers of groups in whose registers heads of this many columns fit."""
    return [groups for groups in _ROUNDS if groups < max(_ROUNDS) or head_dim <= _MOST_COLUMNS]


@lru_cache
def hopper_groups(rows: int, heads: int, head_dim: int, longest: int, on: Architecture) -> int:
    """Groups of warps, with 64 queries each, that compute a tile of `hopper_attention`.

    Their rounds take the least time if all segments are as long as the longest.
    """
    segments = -(-rows // max(longest, 1))

    def seconds(groups: int) -> float:
        tiles = segments * -(-longest // (groups * GROUP_ROWS)) * heads
        return -(-tiles // on.processors) * _ROUNDS[groups]

    return min(fitting_groups(head_dim), key=seconds)


class AttentionTile(NamedTuple):
    """The tile that one program of the attention kernel works on at a time."""

    rows: int
    keys: int
    whole: int
    """Columns of a head in the first product: a power of two."""
    rest: int
    """Columns of a second product of queries and keys, for those left over; 0 if none are."""
    spare: int
    """Columns of a second product with values."""
    stages: int
    warps: int

    def shared_bytes(self, itemsize: int, on: Architecture) -> int:
        """Shared memory of one program, at most."""
        values = self.whole + (self.spare if self.rest else 0)
        blocks = self.stages * self.keys * (self.whole + self.rest + values)
        queries = self.rows * (self.whole + self.rest) if on.multiplies_from_shared else 0
        return itemsize * (blocks + queries) + _BARRIER_BYTES


class Division(NamedTuple):
    """The division of attention's rows among programs."""

    rows: int
    """Rows of a tile."""
    programs: int = 0
    """They take tiles and heads in turn, and skip the tiles of empty slots at once; 0: a program for each."""


@lru_cache
def attention_division(rows: int, heads: int, longest: int, on: Architecture) -> Division:
    """Small tiles if they are few, and programs that take turns where the device holds all of them at once."""
    few, many = (-(-rows // each) * heads for each in (_FEW_ROWS, _MANY_ROWS))
    if few <= on.processors:
        return Division(_FEW_ROWS, on.processors)
    if many >= _PROGRAMS * on.processors:
        return Division(_MANY_ROWS)
    if longest <= _FEW_ROWS:
        return Division(_FEW_ROWS)
    return Division(_MANY_ROWS, on.processors if many <= on.processors else _PROGRAMS * on.processors)


@lru_cache
def attention_tile(division: Division, head_dim: int, itemsize: int, on: Architecture) -> AttentionTile:
    """The tile of a program, with as many stages and keys as shared memory allows.

    Values of 72 or 80 columns are computed as 64 + 64 where matrix units read from shared memory, since Triton 3.6
    miscompiles products that are narrower there. Programs of many rows have eight warps, in whose registers everything
    fits; on Hopper four, which were measured, unless each has a multiprocessor of its own.
    """
    whole = 1 << (head_dim.bit_length() - 1)
    rest = max(_NARROWEST, 1 << (head_dim - whole - 1).bit_length()) if head_dim > whole else 0
    spare = 64 if on.multiplies_from_shared or not rest else rest
    many = division.rows == _MANY_ROWS
    alone = 0 < division.programs <= on.processors
    warps = 8 if many and (alone or on.capability[0] != _HOPPER) else 4
    sizes = _STAGES_AND_KEYS if many or alone else _STAGES_AND_KEYS[1:]
    tiles = [AttentionTile(division.rows, keys, whole, rest, spare, stages, warps) for stages, keys in sizes]
    return next((tile for tile in tiles if tile.shared_bytes(itemsize, on) <= on.block_bytes), tiles[-1])
