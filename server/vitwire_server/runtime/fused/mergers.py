"""What a tower computes outside of its blocks: in recorded forwards, mergers of inner layers run beside the blocks.

With few rows a merger reads far more weights than it computes with, and the blocks leave most of the memory's bandwidth
unused: a recorded forward runs them on a stream of their own, and waits for them before the tower's last merger.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from vitwire_server.runtime.products.tuned import Products
from vitwire_server.runtime.recording import is_recording

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
