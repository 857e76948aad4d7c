"""Learned positions of a tower in one kernel: transformers gathers four rows a patch in float32 before it sums them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vitwire_server.runtime.kernels.positions import interpolated

_INDICES, _WEIGHTS = "interp_indices", "interp_weights"


class Positions(nn.Module):
    """In the place of the table's module: returns, instead of rows of the table, the sums that `forward_with` made.

    They are the only tap of each patch, of weight 1.
    """

    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self.table = table
        self._rows: Tensor | None = None
        self._one: Tensor | None = None

    @property
    def weight(self) -> Tensor:
        """The table."""
        return self.table.weight

    def forward(self, indices: Tensor) -> Tensor:
        """`(patches, taps)` to `(patches, taps, columns)`; one tap within `forward_with`."""
        return self.table(indices) if self._rows is None else self._rows[:, None]

    def forward_with(self, forward: Callable[..., Any], *arguments: object, **named: Any) -> Any:  # noqa: ANN401 - of transformers
        """`forward` of the tower, whose positions are interpolated at once."""
        indices, weights = named.get(_INDICES), named.get(_WEIGHTS)
        if indices is None or weights is None or not self.weight.is_cuda:
            return forward(*arguments, **named)
        if self._one is None:
            self._one = torch.ones((1, 1), dtype=self.weight.dtype, device=self.weight.device)
        self._rows = interpolated(self.weight, indices, weights)
        try:
            return forward(*arguments, **named | {_WEIGHTS: self._one.expand(len(indices), 1)})
        finally:
            self._rows = None


def hasten_positions(model: nn.Module) -> bool:
    """Interpolate the positions of a tower of Qwen3-VL's form in one kernel; whether it has this form."""
    table = getattr(model, "pos_embed", None)
    if not isinstance(table, nn.Embedding) or not hasattr(model, "num_grid_per_side"):
        return False
    positions = Positions(table)
    model.pos_embed = positions
    model.forward = partial(positions.forward_with, model.forward)
    return True
