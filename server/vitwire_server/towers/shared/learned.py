"""Learned positions: looked up, resampled, or chosen by a patch's share of its image's sides; SAM's relative ones."""

from collections.abc import Mapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from vitwire_server.towers.layouts.patches import TAPS
from vitwire_server.towers.metadata import Kind, Rows
from vitwire_server.towers.shared.parts import Constants

TAPPED: Mapping[str, Kind] = {
    "interp_indices": Rows((TAPS["bilinear"],), torch.int64),
    "interp_weights": Rows((TAPS["bilinear"],), torch.float32),
}
"""Metadata of positions that are resampled in the forward: of each patch, places in the table and their weights."""


def positioned(embeddings: Any, pixels: Tensor, positions: Tensor, side: int) -> Tensor:  # noqa: ANN401 - a stock module
    """Rows of pixels, of patches with this side, through a stock convolution, and their learned positions.

    `pixels (patches, C*p*p)` and `positions (patches,)` to `(1, patches, C)`.
    """
    patches = embeddings.patch_embedding(pixels.view(len(pixels), -1, side, side)).flatten(1)
    states: Tensor = (patches + embeddings.position_embedding(positions)).unsqueeze(0)
    return states


def fix_positions(embeddings: nn.Module, resampled: Tensor, table: str, resample: str) -> None:
    """Give a module the positions of one size of tiles, in place of its `table`.

    Its method `resample`, which it would call in every forward, returns them.
    """
    setattr(embeddings, table, nn.Parameter(resampled.clone(), requires_grad=False))
    setattr(embeddings, resample, MethodType(lambda own, *_: getattr(own, table), embeddings))


def fractional_positions(rows: int, columns: int, side: int) -> Tensor:
    """Idefics' choice of a learned position for each patch, `(rows * columns,)`, of a square table of `side * side`.

    In float32, whatever the tower computes in: if a patch begins on a boundary of the table, rounding decides.
    """
    down, across = (_nearest(count, side) for count in (rows, columns))
    return (down[:, None] * side + across).flatten()


def _nearest(count: int, side: int) -> Tensor:
    shares = torch.arange(count, dtype=torch.float32) * (1.0 / torch.tensor(count))
    return torch.bucketize(shares.clamp(max=1 - 1e-6), torch.arange(1 / side, 1.0, 1 / side), right=True)


@torch.no_grad()
def gather_relative_positions(encoder: nn.Module, grids: tuple[int, ...]) -> None:
    """Make a stock SAM encoder, which sees grids of these sides, free of indices made on the host.

    Each attention looks up its tables `(2 * side - 1, C)` gathered as `(side, side, C)`, for each of its sides.
    """
    layers: Any = encoder.layers
    for layer in layers:
        attention = layer.attn
        sides = (layer.window_size,) if layer.window_size else grids
        gathered = [
            {f"of_{side}": attention.get_rel_pos(side, side, table.float()) for side in sides}
            for table in (attention.rel_pos_h, attention.rel_pos_w)
        ]
        attention.gathered = nn.ModuleList([Constants(**tensors) for tensors in gathered])

        def looked_up(q_size: int, k_size: int, rel_pos: Tensor, own: Any = attention) -> Tensor:  # noqa: ANN401
            assert q_size == k_size, "queries and keys are of one grid"
            rows: Tensor = getattr(own.gathered[0 if rel_pos is own.rel_pos_h else 1], f"of_{q_size}")
            return rows.to(rel_pos.dtype)

        attention.get_rel_pos = looked_up
