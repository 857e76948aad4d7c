"""The parts of layers that can be fused: their names, and what they compute before and after attention.

Layers have the same form, norm, attention, add, norm, MLP, add, under several names. They compute in the tower's dtype
(`Exact`) or in float8 (`Float8`).
"""

from collections.abc import Callable, Set
from dataclasses import dataclass
from inspect import signature
from operator import attrgetter
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from vitwire_server.runtime.kernels.norms import add_norm, add_norm_quantise, epsilon
from vitwire_server.runtime.kernels.operands import Scaled
from vitwire_server.runtime.kernels.quantise import activate_quantise
from vitwire_server.runtime.kernels.rowwise import activate, activation_name
from vitwire_server.runtime.precision.float8 import Float8Linear
from vitwire_server.runtime.products.tuned import Products

_ARGUMENTS = ("hidden_states", "attention_mask", "position_embeddings")
"""Of a layer's forward, in their order; the last ones may be missing."""
_SEPARATE = ("q_proj", "k_proj", "v_proj")
_MLPS = (
    ("gate_proj", "up_proj", "act_fn", "down_proj"),
    ("linear_fc1", "act_fn", "linear_fc2"),
    ("up_proj", "act_fn", "down_proj"),
    *(("fc1", act, "fc2") for act in ("act", "activation_fn", "activation")),
)
"""Names of an MLP's parts: its first layers, of which two are gated, the activation and the last layer."""
_LLAMA = ("input_layernorm", "post_attention_layernorm")
_IDLE = (nn.Identity, nn.Dropout)
"""Modules that do nothing in inference."""


@dataclass(frozen=True, slots=True)
class Form:
    """The names that a kind of layer has for its parts."""

    norms: tuple[str, str]
    attention: str
    output: str
    mlp: str = "mlp"
    factors: tuple[str, ...] = ()
    """Paths of the factors `(hidden,)` or `(1,)` of what attention and the MLP add."""
    squash: Callable[[Tensor], Tensor] = torch.clone
    """From such a parameter to the factor."""
    projections: tuple[str, ...] = _SEPARATE
    """The layers for queries, keys and values."""

    def fits(self, layer: nn.Module) -> bool:
        """Whether a layer has these parts and no others that compute something."""
        parts = dict(layer.named_children())
        named = {*self.norms, self.attention, self.mlp}
        if not named <= parts.keys():
            return False
        inner = dict(parts[self.attention].named_children())
        wanted = {self.output, *self.projections}
        others = parts.keys() - named - {path.split(".")[0] for path in self.factors}
        extras = inner.keys() - wanted - {"q_norm", "k_norm"}
        if not {path for path in self.factors if "." not in path} <= dict(layer.named_parameters(recurse=False)).keys():
            return False
        return wanted <= inner.keys() and all(map(_is_idle, (*map(parts.get, others), *map(inner.get, extras))))

    def unknown_arguments(self, layer: nn.Module, known: Set[str]) -> list[str]:
        """Arguments other than the usual ones in their order; else those of attention that are not `known`.

        Layers pass arguments on to attention by keyword, also such as they do not name themselves.
        """
        taken = [name for name in signature(layer.forward).parameters if name != "kwargs"]
        if taken != list(_ARGUMENTS[: len(taken)]):
            return taken
        inner = signature(layer.get_submodule(self.attention).forward).parameters.keys()
        return sorted(inner - {*_ARGUMENTS[:2], "kwargs"} - (known & {*taken, "cu_seqlens"}))


def _is_idle(part: nn.Module | None) -> bool:
    return isinstance(part, _IDLE) or type(part).__name__.endswith("DropPath")


PLAIN = Form(("layer_norm1", "layer_norm2"), "self_attn", "out_proj")
ROTARY = Form(("attention_norm", "ffn_norm"), "attention", "o_proj", mlp="feed_forward")
"""Pixtral."""
OF_TILES = (
    PLAIN,
    Form(("layer_norm1", "layer_norm2"), "self_attn", "projection_layer"),
    Form(("layernorm_before", "layernorm_after"), "attention", "o_proj"),
    Form(("layernorm_before", "layernorm_after"), "attention", "projection_layer", factors=("lambda_1", "lambda_2")),
    Form(("norm1", "norm2"), "attention", "o_proj", factors=("layer_scale1.lambda1", "layer_scale2.lambda1")),
    Form(("rms_norm1", "rms_norm2"), "attention", "out_proj", mlp="ffn"),
    Form(_LLAMA, "self_attn", "o_proj", factors=("gate_attn", "gate_ffn"), squash=torch.tanh),
    Form(_LLAMA, "self_attn", "o_proj"),
)
"""CLIP and SigLIP, Janus, ViT, InternVL, DINOv2, AIMv2, Llama 3.2 Vision with gates and without."""
OF_BLOCKS = tuple(
    Form(("norm1", "norm2"), "attn", "proj", projections=each) for each in (("qkv",), _SEPARATE, ("q", "k", "v"))
)
"""Qwen's blocks, and those that take the same arguments."""


class Exact:
    """In the tower's dtype, by its products.

    Tanh GELU is fused into the product before it; other activations are a separate kernel. Queries, keys and values
    are one product, as are gate and up projection: the stock modules' weights become views of its weight.
    """

    def __init__(self, form: Form, stock: nn.Module, products: Products) -> None:
        """Raises ValueError, AttributeError."""
        attention = stock.get_submodule(form.attention)
        self._products = products
        self._norms = _norms_of(form, stock)
        self._output: nn.Linear = getattr(attention, form.output)
        self.columns = self._output.out_features
        """Of a row."""
        self.factors = [form.squash(attrgetter(path)(stock)) for path in form.factors]
        """`(hidden,)` or `(1,)` each, of what attention and the MLP add; or none."""
        layers, self._kind, self._last = _mlp_of(form, stock)
        self._gated = len(layers) > 1
        self._inner = _joined(*layers)
        self._qkv = _joined(*(getattr(attention, name) for name in form.projections))
        if len(self._qkv[0]) != 3 * self._output.in_features:
            raise ValueError("keys have fewer heads than queries")
        products.register(self._inner[0], self._last.weight, self._qkv[0], self._output.weight)

    def heads(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """`hidden (rows, hidden)`, and queries, keys and values of its first norm, `(rows, 3 * heads * head_dim)`."""
        hidden, normed = add_norm(hidden, None, self._norms[0], overlapping=True)
        return hidden, self._products.linear(normed, *self._qkv)

    def end(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """`hidden` with what attention and the MLP add."""
        output, last, products = self._output, self._last, self._products
        if not self.factors:
            hidden, normed = products.add_norm(hidden, attended, output, self._norms[1], last.bias)
            return products.add(hidden, self._activated(normed), last.weight)
        added = products.linear(attended, output.weight, output.bias)
        hidden, normed = add_norm(torch.addcmul(hidden, added, self.factors[0]), None, self._norms[1])
        added = products.linear(self._activated(normed), last.weight, last.bias)
        return torch.addcmul(hidden, added, self.factors[1])

    def _activated(self, rows: Tensor) -> Tensor:
        """Normalised rows to the input of the MLP's last layer."""
        weight, bias = self._inner
        gelu = self._kind == "gelu_pytorch_tanh" and not self._gated and rows.is_cuda and bias is not None
        inner = self._products.linear(rows, weight, bias, gelu=gelu)
        return inner if gelu else activate(inner, self._kind, gated=self._gated)


class Float8:
    """In float8, as `float8.reduce` has left a layer: norms and activations write float8 rows and their scales.

    A layer ends with the first norm of the layer after it, which takes the sum of the residual stream in the same
    kernel.
    """

    _entered: tuple[Tensor, Scaled] | None = None
    """The previous layer's output: the residual stream, and its first norm."""

    def __init__(self, form: Form, stock: nn.Module) -> None:
        """Raises ValueError, AttributeError."""
        attention: Any = stock.get_submodule(form.attention)
        self._norms = _norms_of(form, stock)
        self.factors: list[Tensor] = []
        self._qkv, self._output = (getattr(attention, name) for name in ("qkv", form.output))
        self.columns = self._output.out_features
        layers, self._kind, self._last = _mlp_of(form, stock)
        self._gated = len(layers) > 1
        if not all(isinstance(layer, Float8Linear) for layer in (self._qkv, *layers, self._last)):
            raise ValueError("only some of its layers are in float8")
        self._inner = Float8Linear.joined(*layers) if self._gated else layers[0]
        self.following: Float8 | None = None
        """Of the layer after this one, whose first norm this one computes."""

    def heads(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """As `Exact.heads`."""
        entered, self._entered = self._entered, None
        if not entered or entered[0] is not hidden:
            entered = add_norm_quantise(hidden, None, self._norms[0])
        return entered[0], self._qkv(entered[1])

    def end(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """As `Exact.end`."""
        hidden, rows = add_norm_quantise(hidden, self._output(attended), self._norms[1], ahead=self._last.bias)
        inner = activate_quantise(self._inner(rows), self._kind, gated=self._gated)
        added = self._last.product(inner, biased=False)
        if self.following is None:
            return hidden.add_(added)
        entered = add_norm_quantise(hidden, added, self.following._norms[0])  # noqa: SLF001 - its own class
        self.following._entered = entered  # noqa: SLF001 - as above
        return entered[0]


Parts: TypeAlias = Exact | Float8


def _norms_of(form: Form, stock: nn.Module) -> list[nn.Module]:
    """The norms of a layer. Raises ValueError if kernels do not compute one of them."""
    norms = [stock.get_submodule(name) for name in form.norms]
    for norm in norms:
        epsilon(norm)
    return norms


def _mlp_of(form: Form, stock: nn.Module) -> tuple[list[Any], str, Any]:
    """The first layers of a layer's MLP, its activation and its last layer. Raises ValueError."""
    mlp = stock.get_submodule(form.mlp)
    names = {name for name, part in mlp.named_children() if not isinstance(part, _IDLE)}
    known = next((each for each in _MLPS if names == set(each)), None)
    if known is None:
        raise ValueError(f"unknown MLP with {', '.join(sorted(names))}")
    *layers, act, last = (getattr(mlp, name) for name in known)
    kind = activation_name(act)
    if kind is None:
        raise ValueError(f"unknown activation {type(act).__name__}")
    return layers, kind, last


def _joined(*layers: nn.Linear) -> tuple[Tensor, Tensor | None]:
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
