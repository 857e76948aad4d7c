"""Rotary positions of tiles."""

import torch
from torch import Tensor

from vitwire_server.runtime.products.tuned import Products


class Angles:
    """Cosines and sines of all rows of a forward, which its layers share, and their products."""

    def __init__(self) -> None:
        self.products = Products()
        self._laid: dict[int, tuple[Tensor, Tensor]] = {}

    def clear(self) -> None:
        """Start a new forward: the same tensors may have new values."""
        self._laid.clear()

    def of(self, rotary: tuple[Tensor, Tensor], tiles: int, tokens: int) -> tuple[Tensor, Tensor]:
        """Those of `tiles * tokens` rows; tokens before the patches of a tile are not rotated."""
        cos, sin = rotary
        if id(cos) not in self._laid:
            leading = (tokens - len(cos), cos.shape[1])
            cosines = torch.cat([cos.new_ones(leading), cos]).repeat(tiles, 1)
            self._laid[id(cos)] = cosines, torch.cat([sin.new_zeros(leading), sin]).repeat(tiles, 1)
        return self._laid[id(cos)]
