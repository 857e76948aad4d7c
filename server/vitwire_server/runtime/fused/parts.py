"""The linear layers, norms and MLP of a fused layer, in the tower's dtype or in float8."""

from operator import attrgetter
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from vitwire_server.runtime.fused.forms import Form
from vitwire_server.runtime.fused.mlps import joined, mlp_of, mlp_parts
from vitwire_server.runtime.kernels.activations import KINDS, activation_name
from vitwire_server.runtime.kernels.norms import add_norm, epsilon
from vitwire_server.runtime.kernels.operands import Scaled
from vitwire_server.runtime.kernels.quantise import activate_quantise, add_norm_quantise
from vitwire_server.runtime.precision.float8 import Float8Linear
from vitwire_server.runtime.products.tuned import Products


class Parts(Protocol):
    """What a layer computes before and after attention, on rows `(rows, hidden)`."""

    columns: int
    """Of a row."""
    factors: list[Tensor]
    """`(hidden,)` each, of what attention and the MLP add; or none."""

    def heads(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """`hidden`, and queries, keys and values of its first norm, `(rows, 3 * heads * head_dim)`."""
        ...

    def end(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """`hidden` with what attention and the MLP add."""
        ...


class Exact:
    """In the tower's dtype, by its products; activations are fused into the products before them."""

    def __init__(self, form: Form, stock: nn.Module, products: Products) -> None:
        """Raises ValueError, AttributeError."""
        attention = stock.get_submodule(form.attention)
        self._products = products
        self._norms = norms_of(form, stock)
        self._output: nn.Linear = getattr(attention, form.output)
        self.columns = self._output.out_features
        self.factors: list[Tensor] = [attrgetter(path)(stock) for path in form.factors]
        self._mlp = mlp_of(stock.get_submodule(form.mlp), products)
        self._weight, self._bias = joined(*(getattr(attention, name) for name in form.projections))
        if len(self._weight) != 3 * self._output.in_features:
            raise ValueError("keys have fewer heads than queries")
        products.register(self._weight, self._output.weight)

    def heads(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """See Parts."""
        hidden, normed = add_norm(hidden, None, self._norms[0], overlapping=True)
        return hidden, self._products.linear(normed, self._weight, self._bias)

    def end(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """See Parts."""
        output, last, products = self._output, self._mlp.last, self._products
        if not self.factors:
            hidden, normed = products.add_norm(hidden, attended, output, self._norms[1], last.bias)
            return products.add(hidden, self._mlp.inner(normed), last.weight)
        added = products.linear(attended, output.weight, output.bias)
        hidden, normed = add_norm(torch.addcmul(hidden, added, self.factors[0]), None, self._norms[1])
        added = products.linear(self._mlp.inner(normed), last.weight, last.bias)
        return torch.addcmul(hidden, added, self.factors[1])


class Float8:
    """In float8, as `float8.reduce` has left a layer: norms and activations write float8 rows and their scales.

    A layer ends with the first norm of the layer after it, which takes the sum of the residual stream in the same
    kernel.
    """

    _entered: tuple[Tensor, Scaled] | None = None
    """What the layer before left: the residual stream, and its first norm."""

    def __init__(self, form: Form, stock: nn.Module) -> None:
        """Raises ValueError, AttributeError."""
        attention: Any = stock.get_submodule(form.attention)
        self._norms = norms_of(form, stock)
        self.factors: list[Tensor] = []
        self._qkv, self._output = (getattr(attention, name) for name in ("qkv", form.output))
        self.columns = self._output.out_features
        *layers, act, self._last = mlp_parts(stock.get_submodule(form.mlp))
        self._kind, self._gated = str(activation_name(act)), len(layers) > 1
        if self._kind not in KINDS:
            raise ValueError(f"unknown activation {type(act).__name__}")
        if not all(isinstance(layer, Float8Linear) for layer in (self._qkv, *layers, self._last)):
            raise ValueError("only some of its layers are in float8")
        self._inner = Float8Linear.joined(*layers) if self._gated else layers[0]
        self.following: Float8 | None = None
        """Of the layer after this one, whose first norm this one computes."""

    def heads(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """See Parts."""
        entered, self._entered = self._entered, None
        if not entered or entered[0] is not hidden:
            entered = add_norm_quantise(hidden, None, self._norms[0])
        return entered[0], self._qkv(entered[1])

    def end(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """See Parts."""
        hidden, rows = add_norm_quantise(hidden, self._output(attended), self._norms[1], ahead=self._last.bias)
        inner = activate_quantise(self._inner(rows), self._kind, gated=self._gated)
        added = self._last.product(inner, biased=False)
        if self.following is None:
            return hidden.add_(added)
        entered = add_norm_quantise(hidden, added, self.following._norms[0])  # noqa: SLF001 - its own class
        self.following._entered = entered  # noqa: SLF001 - as above
        return entered[0]


def norms_of(form: Form, stock: nn.Module) -> list[nn.Module]:
    """The norms of a layer. Raises ValueError if kernels do not compute one of them."""
    norms = [stock.get_submodule(name) for name in form.norms]
    for norm in norms:
        epsilon(norm)
    return norms
