"""The parts of layers that can be fused: their names, and what they compute before and after attention.

Layers have the same form, norm, attention, add, norm, MLP, add, under several names.
"""

from collections.abc import Callable, Set
from dataclasses import dataclass
from inspect import signature
from operator import attrgetter
from threading import local
from typing import Any

import torch
from torch import Tensor, nn

from vitwire_server.runtime.kernels.norms import Norm, add_norm
from vitwire_server.runtime.kernels.rowwise import activate, activation_name
from vitwire_server.runtime.products.tuned import Linear, Products

_ARGUMENTS = ("hidden_states", "attention_mask", "position_embeddings")
"""Arguments of a layer's forward, in their order; the last ones may be missing."""
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


class Ahead(local):
    """Rows and their norm, computed by the layer before in the same thread."""

    norm: tuple[Tensor, Tensor] | None = None

    def taken(self, hidden: Tensor) -> tuple[Tensor, Tensor] | None:
        """These rows and their norm, which are then forgotten. No tower writes to rows between its layers."""
        norm, self.norm = self.norm, None
        is_same = norm and norm[0].data_ptr() == hidden.data_ptr() and norm[0].shape == hidden.shape
        return norm if is_same else None


class Heads:
    """Queries, keys and values: one product, whose weight the stock modules' become views of."""

    def __init__(self, form: Form, stock: nn.Module, products: Products) -> None:
        """Raises ValueError, AttributeError."""
        self._ahead = Ahead()
        attention = stock.get_submodule(form.attention)
        self._norm, self._products = Norm.of(stock.get_submodule(form.norms[0])), products
        self._qkv = _joined(*(getattr(attention, name) for name in form.projections))
        if len(self._qkv[0]) != 3 * getattr(attention, form.output).in_features:
            raise ValueError("keys have fewer heads than queries")
        products.register(self._qkv[0])

    def __call__(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """See `Parts.heads`."""
        hidden, normed = self._ahead.taken(hidden) or add_norm(hidden, None, self._norm, overlapping=True)
        return hidden, self._products.linear(normed, *self._qkv)

    def enter(self, hidden: Tensor, added: Tensor, factor: Tensor) -> Tensor:
        """`hidden + factor * added`, which the next call is given: one kernel computes it and its norm."""
        self._ahead.norm = add_norm(hidden, added, self._norm, factor=factor, overlapping=True)
        return self._ahead.norm[0]


class End:
    """The output projection of attention and the MLP.

    Tanh GELU is fused into the product before it; other activations are a separate kernel. Gate and up projection are
    one product: the stock modules' weights become views of its weight. With factors, it ends with the first norm of the
    layer after it.
    """

    following: Heads | None = None
    """The heads of the layer after this one."""

    def __init__(self, form: Form, stock: nn.Module, products: Products) -> None:
        """Raises ValueError, AttributeError."""
        self._products, self._norm = products, Norm.of(stock.get_submodule(form.norms[1]))
        output, self._factors = getattr(stock.get_submodule(form.attention), form.output), _factors_of(form, stock)
        layers, self._kind, last = _mlp_of(form, stock)
        self._gated = len(layers) > 1
        self._output, self._inner, self._last = _joined(output), _joined(*layers), _joined(last)
        products.register(self._inner[0], self._last[0], self._output[0])

    def __call__(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """See `Parts.end`."""
        products, (weight, bias) = self._products, self._last
        added = products.linear(attended, *self._output)
        if not self._factors:
            hidden, normed = add_norm(hidden, added, self._norm, bias, overlapping=True)
            return products.add(hidden, self._activated(normed), weight)
        first, second = self._factors
        hidden, normed = add_norm(hidden, added, self._norm, factor=first, overlapping=True)
        added = products.linear(self._activated(normed), weight, bias)
        following = self.following
        return following.enter(hidden, added, second) if following else torch.addcmul(hidden, added, second)

    def _activated(self, rows: Tensor) -> Tensor:
        """Normalised rows to the input of the MLP's last layer."""
        weight, bias = self._inner
        gelu = self._kind == "gelu_pytorch_tanh" and not self._gated and rows.is_cuda and bias is not None
        inner = self._products.linear(rows, weight, bias, gelu=gelu)
        return inner if gelu else activate(inner, self._kind, gated=self._gated)


class Parts:
    """What a layer computes before and after attention."""

    def __init__(self, form: Form, stock: nn.Module, products: Products) -> None:
        """Raises ValueError, AttributeError."""
        attention = stock.get_submodule(form.attention)
        output = getattr(attention, form.output)
        self.columns: int = output.out_features
        self.inner: int = output.in_features
        """Columns of all heads."""
        self.factors = _factors_of(form, stock)
        """`(hidden,)` each, of what attention and the MLP add; or none."""
        self.heads = Heads(form, stock, products)
        """From `hidden (rows, hidden)` to the same and its queries, keys, values `(rows, 3 * heads * head_dim)`."""
        self.end = End(form, stock, products)
        """From `hidden` and what was attended `(rows, heads * head_dim)` to the layer's output."""

    def precede(self, following: "Parts") -> None:
        """Compute the first norm of the layer after this one, if this one has factors."""
        if self.factors:
            self.end.following = following.heads


def _factors_of(form: Form, stock: nn.Module) -> list[Tensor]:
    like: Tensor = stock.get_submodule(form.norms[0]).weight  # type: ignore[assignment]
    return [form.squash(attrgetter(path)(stock)).expand_as(like).contiguous() for path in form.factors]


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


def _joined(*layers: nn.Linear) -> Linear:
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
