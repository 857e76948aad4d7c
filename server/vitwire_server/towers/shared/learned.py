"""Learned positions of packed patches."""

from typing import Any

from torch import Tensor


def positioned(embeddings: Any, pixels: Tensor, positions: Tensor, side: int) -> Tensor:  # noqa: ANN401 - a stock module
    """Rows of pixels, of patches with this side, through a stock convolution, and their learned positions.

    `pixels (patches, C*p*p)` and `positions (patches,)` to `(1, patches, C)`.
    """
    patches = embeddings.patch_embedding(pixels.view(len(pixels), -1, side, side)).flatten(1)
    states: Tensor = (patches + embeddings.position_embedding(positions)).unsqueeze(0)
    return states
