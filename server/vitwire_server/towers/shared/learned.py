"""Learned positions."""

from types import MethodType
from typing import Any

from torch import Tensor, nn


def positioned(embeddings: Any, pixels: Tensor, positions: Tensor, side: int) -> Tensor:  # noqa: ANN401 - a stock module
    """Rows of pixels, of patches with this side, through a stock convolution, and their learned positions.

    `pixels (patches, C*p*p)` and `positions (patches,)` to `(1, patches, C)`.
    """
    patches = embeddings.patch_embedding(pixels.view(len(pixels), -1, side, side)).flatten(1)
    states: Tensor = (patches + embeddings.position_embedding(positions)).unsqueeze(0)
    return states


def fix_positions(embeddings: Any, resampled: Tensor, table: str, resample: str) -> None:  # noqa: ANN401 - a stock module
    """Give a module the positions of one size of tiles, in place of its `table`.

    Its method `resample`, which it would call in every forward, returns them.
    """
    setattr(embeddings, table, nn.Parameter(resampled.clone(), requires_grad=False))
    setattr(embeddings, resample, MethodType(lambda own, *_: getattr(own, table), embeddings))
