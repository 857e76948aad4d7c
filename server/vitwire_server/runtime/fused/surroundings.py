"""What a tower computes outside of its blocks: learned positions in one kernel, mergers beside the blocks.

transformers gathers four positions for each patch in float32 before it sums them. With few rows a merger reads far more
weights than it computes with, and the blocks leave most of the memory's bandwidth unused: a recorded forward runs
mergers of inner layers on a separate stream, and waits for them before the tower's last merger.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vitwire_server.runtime.kernels.rowwise import interpolated
from vitwire_server.runtime.products.tuned import Products
from vitwire_server.runtime.recording import is_recording

_INDICES, _WEIGHTS = "interp_indices", "interp_weights"
_MOST_ROWS = 512
"""Rows up to which branches are faster: with more, blocks and mergers need the same processors."""
_INNER, _LAST = "deepstack_merger_list", "merger"

Forward = Callable[[Tensor], Tensor]


def hasten_mergers(model: nn.Module, blocks: Sequence[nn.Module]) -> int:
    """Take the fastest products outside of `blocks`, and run inner mergers beside them; returns the number of products.

    Once, for a tower on a CUDA device.
    """
    products = Products()
    within = {id(module) for block in blocks for module in block.modules()}
    linears = [module for module in model.modules() if isinstance(module, nn.Linear) and id(module) not in within]
    for linear in linears:
        products.register(linear.weight)
        linear.forward = partial(_product, products, linear)  # type: ignore[method-assign]
    inner, last = getattr(model, _INNER, None), getattr(model, _LAST, None)
    if isinstance(inner, nn.ModuleList) and isinstance(last, nn.Module):
        branches = Branches()
        for module in inner:
            module.forward = partial(branches.beside, module.forward)
        last.forward = partial(branches.joined, last.forward)
    return len(linears)


class Branches:
    """A stream for what nothing waits for until `joined`. Used on the engine thread."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._read: list[Tensor] = []
        """Kept until the branches are joined, as other kernels could be given their memory."""

    def beside(self, forward: Forward, rows: Tensor) -> Tensor:
        """The result of `forward`, to be read after `joined`."""
        if not rows.is_cuda or len(rows) > _MOST_ROWS or not is_recording():
            return forward(rows)
        self._stream = self._stream or torch.cuda.Stream(rows.device)
        self._read.append(rows)
        self._stream.wait_stream(torch.cuda.current_stream(rows.device))
        with torch.cuda.stream(self._stream):
            return forward(rows)

    def joined(self, forward: Forward, rows: Tensor) -> Tensor:
        """The result of `forward`, after all branches."""
        if self._read and self._stream is not None:
            torch.cuda.current_stream(rows.device).wait_stream(self._stream)
            self._read.clear()
        return forward(rows)


def _product(products: Products, linear: nn.Linear, rows: Tensor) -> Tensor:
    if rows.dim() != 2:
        return nn.functional.linear(rows, linear.weight, linear.bias)
    return products.linear(rows, linear.weight, linear.bias)


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
