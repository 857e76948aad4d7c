"""Fused layers of other forms than Qwen's: of tiles, which attend to all of their tile, or of packed patches.

As in `fusion`, a layer of the usual form is replaced by the same arithmetic with no more roundings: one product for
queries, keys and values, norms with the additions before them, and activations in the products before them. Each is
compared with the stock layer before it is used.
"""

import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from vitwire_server.runtime.attention.selection import Selection
from vitwire_server.runtime.fused.angles import Angles
from vitwire_server.runtime.fused.blocks import KernelFailed, NotFusable, TileCache, comparing, tolerance_of
from vitwire_server.runtime.fused.forms import FORMS, PLAIN, ROTARY, Form
from vitwire_server.runtime.fused.mlps import joined, mlp_of
from vitwire_server.runtime.kernels.attention import segment_attention
from vitwire_server.runtime.kernels.norms import add_norm, epsilon
from vitwire_server.runtime.kernels.rotary import rotate
from vitwire_server.runtime.products.tuned import Products
from vitwire_server.towers.shared.siglip import packed_layers

_log = logging.getLogger(__name__)
_UNITS, _TOKENS, _LEADING = 2, 24, 5
"""Of the random rows that a fused layer is compared on; the leading tokens of a tile are not rotated."""
_LEAST_FACTOR = 1e-3
"""Smaller rows would be lost in the epsilon of norms."""


class Layer(ABC):
    """A layer of one of `FORMS`."""

    def __init__(self, stock: nn.Module, products: Products, forms: Iterable[Form] = FORMS) -> None:
        """Raises NotFusable."""
        form = next((each for each in forms if each.fits(stock)), None)
        if form is None:
            names = ", ".join(name for name, _ in stock.named_children())
            raise NotFusable(f"unknown form, with {names}")
        attention: Any = stock.get_submodule(form.attention)
        self._products = products
        try:
            self._norms = tuple(stock.get_submodule(name) for name in form.norms)
            for norm in self._norms:
                epsilon(norm)
            self._heads = int(_either(attention, "num_heads", "num_attention_heads"))
            self._scale = float(_either(attention, "scale", "scaling"))
            self._output: nn.Linear = getattr(attention, form.output)
            self._factors: list[Tensor] = [attrgetter(path)(stock) for path in form.factors]
            self._mlp = mlp_of(stock.get_submodule(form.mlp), products)
            self._weight, self._bias = joined(attention.q_proj, attention.k_proj, attention.v_proj)
        except (AttributeError, ValueError) as error:
            raise NotFusable(str(error)) from error
        if len(self._weight) != 3 * self._output.in_features:
            raise NotFusable("keys have fewer heads than queries")
        products.register(self._weight, self._output.weight)
        self.form = form
        self._head_norms = [getattr(attention, name, nn.Identity()) for name in ("q_norm", "k_norm")]
        self._causal = bool(getattr(attention, "is_causal", False))

    @property
    def columns(self) -> int:
        """Of a row."""
        return self._output.out_features

    @property
    def smallest_factor(self) -> float:
        """About how much smaller than a row is what a layer adds to it."""
        return min([1.0, *(max(_LEAST_FACTOR, float(each.abs().mean())) for each in self._factors)])

    @property
    @abstractmethod
    def known_arguments(self) -> set[str]:
        """What attention may take beside rows and mask: what is compared, or what the tower never gives."""

    @abstractmethod
    def compared(self, stock: nn.Module, rows: Tensor) -> list[tuple[Tensor, Tensor]]:
        """What the stock layer and this one make of rows `(units, tokens, hidden)`, in each way it is computed."""

    def _computed(
        self, hidden_states: Tensor, attend: Callable[..., Tensor], place: Callable[[Tensor], None] | None = None
    ) -> Tensor:
        """The forward on `(units, tokens, hidden)`; `attend` takes heads and returns rows, in the same layout.

        `place` rotates queries and keys of `(units, tokens, 3, heads, head_dim)` by their positions, in place.
        `hidden_states` are not written to: towers keep those of several layers.
        """
        shape, products, (first, second) = hidden_states.shape, self._products, self._norms
        rows = hidden_states.reshape(-1, shape[-1]).contiguous()  # one tile from a convolution has its columns first
        hidden, normed = add_norm(rows, None, first, overlapping=True)
        qkv = products.linear(normed, self._weight, self._bias).view(*shape[:2], 3, self._heads, -1)
        if place:
            place(qkv)
        q, k, v = qkv.unbind(2)
        q, k = (
            each if isinstance(norm, nn.Identity) else norm(each.flatten(-2)).view(each.shape)
            for each, norm in zip((q, k), self._head_norms, strict=True)
        )
        attended = attend(q, k, v).reshape(len(hidden), -1)
        if self._factors:
            return self._scaled(hidden, attended).view(shape)
        hidden, normed = products.add_norm(hidden, attended, self._output, second, self._mlp.last.bias)
        return products.add(hidden, self._mlp.inner(normed), self._mlp.last.weight).view(shape)

    def _scaled(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """The rest of a layer that multiplies what it adds to `hidden` by factors."""
        output, last = self._output, self._mlp.last
        added = self._products.linear(attended, output.weight, output.bias)
        hidden, normed = add_norm(torch.addcmul(hidden, added, self._factors[0]), None, self._norms[1])
        added = self._products.linear(self._mlp.inner(normed), last.weight, last.bias)
        return torch.addcmul(hidden, added, self._factors[1])


class TileLayer(Layer):
    """Attends to all tokens of a tile."""

    def __init__(self, stock: nn.Module, angles: Angles, *, first: bool) -> None:
        """Raises NotFusable."""
        super().__init__(stock, angles.products)
        self._angles, self._first = angles, first

    def __call__(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **_: object,
    ) -> Tensor:
        """The layer's forward on `hidden_states (tiles, tokens, hidden)`; the mask is added to scores.

        `position_embeddings` are the cosines and sines of the last tokens of each tile, `(patches, head_dim)`.
        """
        if self._first:
            self._angles.clear()
        causal = self._causal and attention_mask is None

        def attend(*heads: Tensor) -> Tensor:
            q, k, v = (each.transpose(1, 2) for each in heads)
            attended = functional.scaled_dot_product_attention(
                q, k, v, attn_mask=attention_mask, scale=self._scale, is_causal=causal
            )
            return attended.transpose(1, 2)

        if position_embeddings is None:
            return self._computed(hidden_states, attend)
        cos, sin = self._angles.of(position_embeddings, *hidden_states.shape[:2])
        return self._computed(hidden_states, attend, lambda qkv: rotate(qkv.flatten(0, 1), cos, sin))

    @property
    def known_arguments(self) -> set[str]:
        """See Layer. A tile is one segment, so no boundaries are given."""
        return {"position_embeddings", "cu_seqlens"}

    def compared(self, stock: nn.Module, rows: Tensor) -> list[tuple[Tensor, Tensor]]:
        """See Layer."""
        self._angles.clear()
        taken = inspect.signature(stock.forward).parameters.keys()
        arguments: dict[str, Any] = dict.fromkeys(taken & {"attention_mask"})
        if "position_embeddings" in taken:
            patches = rows.shape[1] - _LEADING
            angles = torch.linspace(0, 6, patches * (self.columns // self._heads // 2)).view(patches, -1).repeat(1, 2)
            arguments["position_embeddings"] = angles.cos().to(rows), angles.sin().to(rows)
        return [(stock(rows, **arguments), self(rows, **arguments))]


class PackedLayer(Layer):
    """Attends within segments of packed patches."""

    def __init__(self, stock: nn.Module, attention: Selection, tiles: TileCache, *, first: bool) -> None:
        """Raises NotFusable."""
        super().__init__(stock, tiles.products, [PLAIN, ROTARY])
        self._attention, self._tiles, self._first = attention, tiles, first

    def __call__(
        self,
        hidden_states: Tensor,
        attention_mask: None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        *,
        cu_seq_lens_q: Tensor,
        max_length_q: int,
        **_: object,
    ) -> Tensor:
        """The layer's forward on `hidden_states (1, patches, hidden)`."""
        assert attention_mask is None
        if self._first:
            self._tiles.clear()
        chosen = self._attention.at(max_length_q)
        attending = chosen if position_embeddings else self._attention  # as `rotate` or the selection contains NaN

        def place(qkv: Tensor) -> None:
            if position_embeddings:
                cos, sin = (each.reshape(qkv.shape[1], -1).contiguous() for each in position_embeddings)
                rotate(qkv[0], cos, sin, contain=not chosen.isolates)

        def attend(*heads: Tensor) -> Tensor:
            q, k, v = (each[0] for each in heads)
            if chosen.name != "triton":
                return attending.attend(q, k, v, cu_seq_lens_q, max_length_q, self._scale)
            tiles = self._tiles.of(cu_seq_lens_q, len(q), self._heads, max_length_q)
            return segment_attention(q, k, v, cu_seq_lens_q, max_length_q, self._scale, tiles)

        return self._computed(hidden_states, attend, place)

    @property
    def known_arguments(self) -> set[str]:
        """See Layer."""
        return {"position_embeddings"} if self.form is ROTARY else set()

    def compared(self, stock: nn.Module, rows: Tensor) -> list[tuple[Tensor, Tensor]]:
        """See Layer."""
        units, tokens = rows.shape[:2]
        ends = torch.arange(0, (units + 1) * tokens, tokens, dtype=torch.int32, device=rows.device)
        packed, pairs = rows.flatten(0, 1)[None], []
        angles = torch.linspace(0, 6, units * tokens * (self.columns // self._heads // 2)).view(units * tokens, -1)
        angles = angles.to(rows.device).repeat(1, 2)
        rotary = (angles.cos().to(rows), angles.sin().to(rows))
        implementation = self._attention.implementation
        for longest in self._attention.lengths:
            self._tiles.clear()
            attended: dict[str, Any] = {
                "cu_seq_lens_q": ends,
                "cu_seq_lens_k": ends,
                "max_length_q": longest,
                "max_length_k": longest,
            }
            if self.form is ROTARY:
                attended |= {"attention_mask": None, "position_embeddings": rotary}
                expected = stock(packed, **attended)
            else:
                layers: list[Any] = [stock]
                expected = packed_layers(layers, packed, implementation, attended)
            pairs.append((expected.view(rows.shape), self(packed, **attended).view(rows.shape)))
        return pairs


@torch.inference_mode()
def fuse_layers(layers: Iterable[nn.Module], attention: Selection | None) -> int:
    """Replace the forward of layers that can be fused; returns their number. Without `attention`, they are of tiles."""
    tiles, angles, fused, reasons = TileCache(), Angles(), 0, set()
    for stock in layers:
        try:
            layer: TileLayer | PackedLayer = (
                PackedLayer(stock, attention, tiles, first=not fused)
                if attention
                else TileLayer(stock, angles, first=not fused)
            )
            errors = _differences(stock, layer)
        except NotFusable as fault:
            reason = f"{type(stock).__name__}: {fault}"
            if reason not in reasons:
                _log.log(
                    logging.WARNING if isinstance(fault, KernelFailed) else logging.INFO,
                    "layers are not fused: %s",
                    reason,
                )
            reasons.add(reason)
            continue
        if not all(each <= tolerance_of(stock) for each in errors):  # False for NaN
            _log.warning("fused %s is not used: relative errors %s", type(stock).__name__, errors)
            continue
        stock.forward = layer.__call__
        fused += 1
    return fused


def _differences(stock: nn.Module, layer: Layer) -> list[float]:
    """Relative errors, in norm, of what the layer adds to random rows, compared with the stock layer.

    Rows are as small as what is added to them, whose error their rounding would hide. Raises NotFusable.
    """
    if others := layer.form.unknown_arguments(stock, layer.known_arguments):
        raise NotFusable(f"it takes {', '.join(others)}")
    weight = next(stock.parameters())
    rows = torch.randn(_UNITS, _TOKENS, layer.columns, generator=torch.Generator().manual_seed(0)).to(weight)
    rows *= layer.smallest_factor
    with comparing():
        pairs = layer.compared(stock, rows)
    errors = []
    for expected, got in pairs:
        if not isinstance(expected, Tensor):
            raise NotFusable(f"it returns a {type(expected).__name__}")
        added = expected.float() - rows.float()
        errors.append(float((got.float() - rows.float() - added).norm() / added.norm()))
    return errors


def _either(module: nn.Module, *names: str) -> Any:  # noqa: ANN401 - numbers of several types
    """The first of these attributes that a module has. Raises AttributeError."""
    for name in names:
        if hasattr(module, name):
            return getattr(module, name)
    raise AttributeError(f"{type(module).__name__} has none of {', '.join(names)}")
