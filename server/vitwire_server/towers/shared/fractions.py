"""Learned positions of Idefics' towers, chosen by a patch's share of its image's sides."""

import torch
from torch import Tensor


def fractional_positions(rows: int, columns: int, side: int) -> Tensor:
    """The learned position of each patch, `(rows * columns,)`, of a square table of `side * side`.

    In float32, whatever the tower computes in: where a patch begins on a boundary of the table, rounding decides.
    """
    down, across = (_nearest(count, side) for count in (rows, columns))
    return (down[:, None] * side + across).flatten()


def _nearest(count: int, side: int) -> Tensor:
    shares = torch.arange(count, dtype=torch.float32) * (1.0 / torch.tensor(count))
    return torch.bucketize(shares.clamp(max=1 - 1e-6), torch.arange(1 / side, 1.0, 1 / side), right=True)
