"""MLPs of fused blocks, up to their last layer: a product and an activation."""

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from vitwire_server.runtime.kernels.activations import activate, activation_name
from vitwire_server.runtime.products.tuned import Products

_GATED = ("gate_proj", "up_proj", "act_fn", "down_proj")
_PLAIN = (
    ("linear_fc1", "act_fn", "linear_fc2"),
    ("up_proj", "act_fn", "down_proj"),
    *(("fc1", act, "fc2") for act in ("act", "activation_fn", "activation")),
)
"""Names of an MLP's parts, in the order of the arguments of `PlainMlp`."""

IDLE = (nn.Identity, nn.Dropout)
"""Modules that do nothing in inference."""


class Mlp(Protocol):
    """An MLP up to its last layer."""

    last: nn.Linear
    """The last layer, which the block computes."""

    def inner(self, rows: Tensor) -> Tensor:
        """Normalised `rows (rows, hidden)` to the input of the last layer."""
        ...


class PlainMlp:
    """Two linear layers; tanh GELU is fused into the first, other activations are a separate kernel."""

    def __init__(self, products: Products, first: nn.Linear, act: nn.Module, second: nn.Linear) -> None:
        """Raises ValueError."""
        self._products, self._first, self.last, self._kind = products, first, second, _kind(act)
        products.register(first.weight, second.weight)

    def inner(self, rows: Tensor) -> Tensor:
        """See Mlp."""
        first = self._first
        gelu = self._kind == "gelu_pytorch_tanh" and rows.is_cuda and first.bias is not None
        activated = self._products.linear(rows, first.weight, first.bias, gelu=gelu)
        return activated if gelu else activate(activated, self._kind)


class GatedMlp:
    """Gate and up projection as one matrix product; the stock modules' weights become views of its weight."""

    def __init__(self, products: Products, gate: nn.Linear, up: nn.Linear, act: nn.Module, down: nn.Linear) -> None:
        """Raises ValueError."""
        self._kind = _kind(act)
        self.last = down
        self._weight, self._bias = joined(gate, up)
        self._products = products
        products.register(self._weight, down.weight)

    def inner(self, rows: Tensor) -> Tensor:
        """See Mlp."""
        both = self._products.linear(rows, self._weight, self._bias)
        return activate(both, self._kind, gated=True)


def joined(*layers: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of one layer with the channels of several, whose weights become views of it."""
    if len(layers) == 1:
        return layers[0].weight, layers[0].bias
    weight = torch.cat([each.weight for each in layers])
    for each, own in zip(layers, weight.split([each.out_features for each in layers]), strict=True):
        each.weight.data = own
    if all(each.bias is None for each in layers):
        return weight, None
    return weight, torch.cat(
        [weight.new_zeros(each.out_features) if each.bias is None else each.bias for each in layers]
    )


def mlp_of(stock: nn.Module, products: Products) -> Mlp:
    """The MLP of a block. Raises ValueError if it has another form."""
    parts = mlp_parts(stock)
    return GatedMlp(products, *parts) if len(parts) == len(_GATED) else PlainMlp(products, *parts)


def mlp_parts(stock: nn.Module) -> list[Any]:
    """The layers and the activation of an MLP, in the order of `PlainMlp` or `GatedMlp`. Raises ValueError."""
    names = {name for name, part in stock.named_children() if not isinstance(part, IDLE)}
    for form in (_GATED, *_PLAIN):
        if names == set(form):
            return [getattr(stock, name) for name in form]
    raise ValueError(f"unknown MLP with {', '.join(sorted(names))}")


def _kind(act: nn.Module) -> str:
    kind = activation_name(act)
    if kind is None:
        raise ValueError(f"unknown activation {type(act).__name__}")
    return kind
