"""Matrix products of few rows, split along their inner dimension.

The libraries' tiles are made for large products: with few rows their grid leaves most of the device idle. The partial
sums of the splits are added by the norm that follows (`norms.add_norm`), so that no program waits for another. The copy
engine reads the tiles, through tensor descriptors (compute capability 9.0 and newer).
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton import language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from vitwire_server.runtime.kernels.dependent import begin, constants_of, end, is_dependent
from vitwire_server.runtime.kernels.launching import Kernel

_ALIGNMENT = 16
"""Bytes to which the copy engine needs rows to be aligned."""
_BARRIER_BYTES = 1024
"""Most that the compiler adds."""


@dataclass(frozen=True, slots=True)
class Tile:
    """The work of a program: a tile of the result, from one of `splits` parts of the inner dimension."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    splits: int

    def fits(self, weight: Tensor, shared: int) -> bool:
        """Whether a product with `weight` can have this tile on a device with `shared` bytes of shared memory."""
        steps = triton.cdiv(weight.shape[1], self.depth)
        staged = (self.rows + self.columns) * self.depth * self.stages * weight.itemsize
        aligned = weight.is_contiguous() and weight.shape[1] * weight.itemsize % _ALIGNMENT == 0
        return (
            aligned
            and staged + _BARRIER_BYTES <= shared
            and triton.cdiv(steps, self.splits) * (self.splits - 1) < steps
        )


TILES = (
    Tile(64, 64, 64, 4, 5, 3),
    Tile(64, 128, 64, 4, 4, 3),
    Tile(64, 128, 128, 4, 3, 3),
    Tile(128, 128, 64, 4, 4, 4),
    Tile(128, 128, 64, 4, 4, 6),
)
"""The fastest ones for 196 rows of Qwen3-VL-8B on an H200 (docs/performance/tower.md)."""


def partial_sums(rows: Tensor, weight: Tensor, tile: Tile) -> Tensor:
    """`rows (count, depth)` by `weight (columns, depth)`: `(splits, count, columns)` float32, to be added.

    Both are contiguous, and `tile` must fit.
    """
    (count, depth), columns = rows.shape, len(weight)
    parts = torch.empty((tile.splits, count, columns), dtype=torch.float32, device=rows.device)
    dependent = is_dependent(rows.device)
    _partial_sums[triton.cdiv(count, tile.rows) * triton.cdiv(columns, tile.columns), tile.splits](
        TensorDescriptor.from_tensor(rows, [tile.rows, tile.depth]),
        TensorDescriptor.from_tensor(weight, [tile.columns, tile.depth]),
        parts,
        count,
        columns,
        depth,
        triton.cdiv(triton.cdiv(depth, tile.depth), tile.splits),
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **constants_of(dependent),
    )
    return parts


@Kernel
@triton.jit(do_not_specialize=["count", "steps"])
def _partial_sums(
    rows,
    weight,
    parts_ptr,
    count,
    columns,
    depth,
    steps,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    # Programs of the same columns are neighbours: they share the weights in the cache.
    height = tl.cdiv(count, ROWS)
    top = tl.program_id(0) % height * ROWS
    left = tl.program_id(0) // height * COLUMNS
    split = tl.program_id(1)
    begin(DEPENDENT)
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for step in range(split * steps, tl.minimum((split + 1) * steps, tl.cdiv(depth, DEPTH))):
        ours = rows.load([top, step * DEPTH])
        theirs = weight.load([left, step * DEPTH])
        sums = tl.dot(ours, theirs.T, sums, input_precision="ieee")
    end(DEPENDENT)
    row = top + tl.arange(0, ROWS)
    column = left + tl.arange(0, COLUMNS)
    at = (split.to(tl.int64) * count + row)[:, None] * columns + column[None, :]
    tl.store(parts_ptr + at, sums, mask=(row < count)[:, None] & (column < columns)[None, :])
