"""The minimum time of a forward on a device: arithmetic or reading weights, whichever is longer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from vitwire_server.core.grids import Grid
from vitwire_server.towers.layouts.packed import AttentionSpan, PackedTower


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Measured rates of a device: large bf16 matrix products, and copies (bytes read and written)."""

    flops: float
    bytes_per_second: float


H200 = Ceilings(flops=790e12, bytes_per_second=4.3e12)


def floor_seconds(tower: PackedTower, grids: Sequence[Grid], ceilings: Ceilings = H200) -> float:
    """`max(FLOP / flops, weight bytes / bandwidth)` of one forward over these grids."""
    weights: int = sum(weight.nbytes for weight in tower.model.parameters())
    return max(flop(tower, grids) / ceilings.flops, weights / ceilings.bytes_per_second)


def flop(tower: PackedTower, grids: Sequence[Grid]) -> float:
    """Floating-point operations of the blocks and mergers; without patch embedding, norms and rotations.

    With N patches, L layers, d columns, an MLP of m columns and rows of out columns: linear layers
    L*N*2*(4d^2 + 2dm), 3dm where the MLP is gated; mergers (1 + deepstack)*(N/4)*2*((4d)^2 + 4d*out);
    attention 4*d*L*sum(S^2) over its segments S.
    """
    config: Any = tower.model.config
    columns = getattr(config, "embed_dim", None) or config.hidden_size
    mlp = getattr(config, "intermediate_size", None) or int(columns * config.mlp_ratio)
    gated = 3 if tower.family.span is AttentionSpan.WINDOWS else 2
    patches = sum(grid.patches for grid in grids)
    linear = config.depth * patches * 2 * (4 * columns**2 + gated * columns * mlp)
    joined = columns * tower.geometry.merge**2
    out = tower.geometry.width // (1 + tower.geometry.levels)
    merging = (1 + tower.geometry.levels) * (patches / tower.geometry.merge**2) * 2 * (joined**2 + joined * out)
    return float(linear + merging + 4 * columns * _attended(tower, grids))


def _attended(tower: PackedTower, grids: Sequence[Grid]) -> int:
    """Sum over layers and segments of the squared length of the segment."""
    config: Any = tower.model.config
    frames = sum(grid.t * grid.frame_patches**2 for grid in grids)
    if tower.family.span is not AttentionSpan.WINDOWS:
        return int(config.depth * frames)
    full = len(config.fullatt_block_indexes)
    side = config.window_size // config.patch_size
    windows = sum(grid.t * _squares(grid.h, side) * _squares(grid.w, side) for grid in grids)
    return int(full * frames + (config.depth - full) * windows)


def _squares(length: int, side: int) -> int:
    """Sum of squares of the parts of `length` that windows of `side` cut."""
    return (length // side) * side**2 + (length % side) ** 2


def counted_flop(forward: Callable[[], object]) -> float:
    """Floating-point operations of a forward's matrix products and convolutions, as torch counts them.

    Attention is computed as products here, since torch does not count all of its kernels.
    """
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        forward()
    return float(counter.get_total_flops())
