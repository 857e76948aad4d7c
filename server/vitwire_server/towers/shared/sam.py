"""SAM's relative positions, gathered once: the stock forward gathers them by an index made on the host."""

from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import Tensor, nn


class SamAttention(Protocol):
    """A stock attention of SAM, as far as it is changed here."""

    rel_pos_h: nn.Parameter
    rel_pos_w: nn.Parameter
    get_rel_pos: Callable[[int, int, Tensor], Tensor]
    gathered: nn.ModuleList


class SamLayer(Protocol):
    """A stock layer of SAM."""

    window_size: int
    attn: SamAttention


class SamEncoder(Protocol):
    """A stock encoder of SAM."""

    layers: Iterable[SamLayer]


class Gathered(nn.Module):
    """A relative position table `(2 * side - 1, C)` as `(side, side, C)`, for each of some sides."""

    def __init__(self, attention: SamAttention, table: nn.Parameter, sides: tuple[int, ...]) -> None:
        """`attention` is a stock SAM attention, whose own function gathers."""
        super().__init__()
        for side in sides:
            gathered = attention.get_rel_pos(side, side, table.float())
            self.register_buffer(f"of_{side}", gathered, persistent=False)

    def forward(self, side: int) -> Tensor:
        rows: Tensor = getattr(self, f"of_{side}")
        return rows


@torch.no_grad()
def gather_relative_positions(encoder: SamEncoder, grids: tuple[int, ...]) -> None:
    """Make a stock SAM encoder, which sees grids of these sides, free of indices made on the host."""
    for layer in encoder.layers:
        attention = layer.attn
        sides = (layer.window_size,) if layer.window_size else grids
        tables = (attention.rel_pos_h, attention.rel_pos_w)
        attention.gathered = nn.ModuleList([Gathered(attention, table, sides) for table in tables])

        def looked_up(q_size: int, k_size: int, rel_pos: Tensor, own: SamAttention = attention) -> Tensor:
            assert q_size == k_size, "queries and keys are of one grid"
            rows: Tensor = own.gathered[0 if rel_pos is own.rel_pos_h else 1](q_size)
            return rows.to(rel_pos.dtype)

        attention.get_rel_pos = looked_up
