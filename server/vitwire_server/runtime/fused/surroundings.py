"""Computations of a tower outside its blocks: learned positions in one kernel, mergers concurrently with the blocks.

transformers gathers four positions for each patch in float32 before it sums them. With few rows a merger reads far more
weights than it computes with, and the blocks leave most of the memory's bandwidth unused: a recorded forward runs
mergers of inner layers on a separate stream, and waits for them before the tower's last merger.
"""

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import partial

import torch
from torch import Tensor, nn

from vitwire_server.runtime.graph_recording import is_recording, join, read_beside
from vitwire_server.runtime.kernels.rowwise import interpolated
from vitwire_server.runtime.products.tuned import Products
from vitwire_server.towers.rewrites import PatchProjection

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
    for module in model.modules():
        if isinstance(module, PatchProjection):
            products.register(module.matrix)
            module.product = products.linear
    inner, last = getattr(model, _INNER, None), getattr(model, _LAST, None)
    if isinstance(inner, nn.ModuleList) and isinstance(last, nn.Module):
        branches = Branches()
        for module in inner:
            module.forward = partial(branches.beside, module.forward)
        last.forward = partial(branches.joined, last.forward)
    return len(linears)


class Branches:
    """A stream for what nothing waits for until `joined`. Used by one recording at a time."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    def beside(self, forward: Forward, rows: Tensor) -> Tensor:
        """The result of `forward`, to be read after `joined`."""
        if not rows.is_cuda or len(rows) > _MOST_ROWS or not is_recording():
            return forward(rows)
        self._stream = self._stream or torch.cuda.Stream(rows.device)
        read_beside(rows, self._stream)
        self._stream.wait_stream(torch.cuda.current_stream(rows.device))
        with torch.cuda.stream(self._stream):
            return forward(rows)

    def joined(self, forward: Forward, rows: Tensor) -> Tensor:
        """The result of `forward`, after all branches."""
        join()
        return forward(rows)


def _product(products: Products, linear: nn.Linear, rows: Tensor) -> Tensor:
    if rows.dim() != 2:
        return nn.functional.linear(rows, linear.weight, linear.bias)
    return products.linear(rows, linear.weight, linear.bias)


def hasten_positions(model: nn.Module) -> bool:
    """Interpolate the positions of a tower of Qwen3-VL's form in one kernel; whether it has this form.

    Its table then returns, instead of four positions for each patch, their sum as the only one, of weight 1.
    """
    table = getattr(model, "pos_embed", None)
    if not isinstance(table, nn.Embedding) or not hasattr(model, "num_grid_per_side"):
        return False
    weight, look_up, forward = table.weight, table.forward, model.forward
    one = torch.ones((1, 1), dtype=weight.dtype, device=weight.device)
    sums: ContextVar[Tensor | None] = ContextVar("sums", default=None)  # of the forward that this thread runs

    def looked_up(indices: Tensor) -> Tensor:
        own = sums.get()
        return look_up(indices) if own is None else own[:, None]

    def summed(*arguments: object, **named: object) -> object:
        indices, weights = named.get(_INDICES), named.get(_WEIGHTS)
        if not (isinstance(indices, Tensor) and isinstance(weights, Tensor) and weight.is_cuda):
            return forward(*arguments, **named)
        token = sums.set(interpolated(weight, indices, weights))
        try:
            return forward(*arguments, **named | {_WEIGHTS: one.expand(len(indices), 1)})
        finally:
            sums.reset(token)

    table.forward, model.forward = looked_up, summed  # type: ignore[assignment, method-assign]
    return True
