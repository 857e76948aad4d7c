"""Learned positions, resampled to another grid."""

from torch import Tensor
from torch.nn import functional


def resampled(table: Tensor, side: int) -> Tensor:
    """Learned positions `(own * own, C)` of a square grid for one of `side * side`: `(1, side * side, C)`."""
    own = round(len(table) ** 0.5)
    grid = table.T.reshape(1, -1, own, own)
    if own != side:
        grid = functional.interpolate(grid, size=(side, side), mode="bilinear", align_corners=False)
    return grid.flatten(2).transpose(1, 2)
