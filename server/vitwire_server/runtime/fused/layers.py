"""Fused layers: one product for queries, keys and values, our kernels around the products, fewer launches.

Layers of the usual form (norm, attention, add, norm, MLP, add) are replaced by the same arithmetic with no more
roundings. A layer is its `Form`, which names its parts; its `Parts`; and how it attends: to a tile, or within segments
of packed patches.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence, Set
from threading import local
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from vitwire_server.runtime.attention.backends import BACKENDS
from vitwire_server.runtime.attention.selection import Selection
from vitwire_server.runtime.fused.parts import OF_BLOCKS, OF_TILES, PLAIN, ROTARY, Form, Parts
from vitwire_server.runtime.kernels.attention import padded_tiles, segment_attention, segment_tiles
from vitwire_server.runtime.kernels.operands import Segments
from vitwire_server.runtime.kernels.rotary import rotate
from vitwire_server.runtime.products.tuned import Products
from vitwire_server.towers.shared.siglip import packed_layers

_LEADING = 5
"""Tokens of a tile that are not rotated when layers are compared."""
_FEW_TOKENS = 320
"""Tiles of up to this size are faster by our kernel than by torch's attention."""
_KNOWN = {PLAIN: frozenset[str](), ROTARY: frozenset({"position_embeddings"})}
"""See `Layer.known_arguments`: of packed layers, but for Qwen's blocks."""
Made = TypeVar("Made")


class NotFusable(Exception):
    """A layer does not have a supported form; the message says how it differs."""


class Shared(local):
    """State that the layers of a tower share: products, and values computed once per forward, of each thread."""

    def __init__(self, products: Products) -> None:
        self.products = products
        self._made: dict[int | tuple[int, ...], Any] = {}

    def clear(self) -> None:
        """Start a new forward: the same tensors may have new values."""
        self._made.clear()

    def of(self, source: object, make: Callable[[], Made]) -> Made:
        """The value `make` returned for this source, a shape or an object that stays alive during the forward."""
        key = source if isinstance(source, tuple) else id(source)
        if key not in self._made:
            self._made[key] = make()
        made: Made = self._made[key]
        return made


class Layer(ABC):
    """A layer of one of `forms`."""

    forms: ClassVar[Sequence[Form]]
    known_arguments: Set[str] | None
    """Arguments that attention may take besides rows and mask, compared or never given; None: any."""

    def __init__(self, stock: nn.Module, shared: Shared, *, first: bool) -> None:
        """`first` starts a forward. Raises NotFusable."""
        form = next((each for each in self.forms if each.fits(stock)), None)
        if form is None:
            names = ", ".join(name for name, _ in stock.named_children())
            raise NotFusable(f"unknown form, with {names}")
        self.form, self._shared, self._first = form, shared, first
        attention = stock.get_submodule(form.attention)
        try:
            self._heads = int(_either(attention, "num_heads", "num_attention_heads"))
            self._scale = _either(attention, "scale", "scaling")
            self.parts = Parts(form, stock, shared.products)
        except (AttributeError, ValueError) as error:
            raise NotFusable(str(error)) from error
        norms = [getattr(attention, name, nn.Identity()) for name in ("q_norm", "k_norm")]
        self._head_norms = norms if any(not isinstance(norm, nn.Identity) for norm in norms) else []
        self._causal = bool(getattr(attention, "is_causal", False))

    @abstractmethod
    def compared(self, stock: nn.Module, rows: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Outputs of the stock layer and this one for rows `(units, tokens, hidden)`, for each way it is computed."""

    def _computed(self, rows: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
        """The forward on `rows (count, hidden)`, which are not written to: towers keep those of several layers.

        `attend` gets queries, keys and values `(count, 3, heads, head_dim)`, which it may change.
        """
        if self._first:
            self._shared.clear()
        hidden, qkv = self.parts.heads(rows.contiguous())  # one tile from a convolution has its columns first
        count = rows.shape[0]
        return self.parts.end(hidden, attend(qkv.view(count, 3, self._heads, -1)).reshape(count, -1))

    def _normed(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys with their norms, and values, `(count, heads, head_dim)` each."""
        if self._head_norms:
            q, k = (
                norm(each.flatten(-2)).view(each.shape) for each, norm in zip((q, k), self._head_norms, strict=True)
            )
        return q, k, v

    def _rotary(self, count: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of `count` rows to compare layers on."""
        angles = torch.linspace(0, 6, count * (self.parts.inner // self._heads // 2)).view(count, -1)
        angles = angles.to(like.device).repeat(1, 2)
        return angles.cos().to(like), angles.sin().to(like)


class TileLayer(Layer):
    """Attends to all tokens of a tile."""

    forms = OF_TILES
    known_arguments = frozenset({"position_embeddings", "cu_seqlens"})  # never boundaries, as a tile is one segment

    def __init__(self, stock: nn.Module, shared: Shared, *, first: bool) -> None:
        """Raises NotFusable."""
        super().__init__(stock, shared, first=first)
        weight, head_dim = next(stock.parameters()), self.parts.inner // self._heads
        fault = BACKENDS["triton"].fault(weight.device, weight.dtype, head_dim, captured=True)
        self._few_tokens = 0 if fault or self._causal else _FEW_TOKENS

    def __call__(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **_: object,
    ) -> Tensor:
        """The layer's forward on `hidden_states (tiles, tokens, hidden)`.

        The mask is added to scores. With a mask of one dimension, tokens `mask[i]` and later of tile `i` attend only to
        the tokens before.
        `position_embeddings` are the cosines and sines of the last tokens of each tile, `(patches, head_dim)`.
        """
        tiles, tokens = hidden_states.shape[:2]
        causal = self._causal and attention_mask is None

        def attend(qkv: Tensor) -> Tensor:
            if position_embeddings:
                cos, sin = self._shared.of(position_embeddings[0], lambda: _padded(*position_embeddings, tiles, tokens))
                rotate(qkv, cos, sin)
            heads = self._normed(*qkv.unbind(1))
            if found := self._segments(attention_mask, tiles, tokens, qkv.device):
                segments, own = found
                return segment_attention(*heads, segments, self._scale, own)
            shape = tiles, tokens, self._heads, -1
            q, k, v = (each.view(shape).transpose(1, 2) for each in heads)
            attended = functional.scaled_dot_product_attention(
                q, k, v, attn_mask=attention_mask, scale=self._scale, is_causal=causal
            )
            return attended.transpose(1, 2)

        return self._computed(hidden_states.flatten(0, 1), attend).view(hidden_states.shape)

    def _segments(
        self, mask: Tensor | None, tiles: int, tokens: int, device: torch.device
    ) -> tuple[Segments, Tensor] | None:
        """Segments and their tiles for `segment_attention`; None if torch is faster, or only torch takes the mask."""
        heads = self._heads
        if mask is not None:
            return self._shared.of(mask, lambda: padded_tiles(mask, tokens, heads)) if mask.dim() == 1 else None
        if tokens > self._few_tokens:
            return None

        def made() -> tuple[Segments, Tensor]:
            ends = torch.arange(0, (tiles + 1) * tokens, tokens, dtype=torch.int32, device=device)
            segments = Segments(ends, tokens)
            return segments, segment_tiles(segments, tiles * tokens, heads)

        return self._shared.of((tiles, tokens, heads), made)

    def compared(self, stock: nn.Module, rows: Tensor) -> list[tuple[Tensor, Tensor]]:
        taken = inspect.signature(stock.forward).parameters.keys()
        arguments: dict[str, Any] = dict.fromkeys(taken & {"attention_mask"})
        if "position_embeddings" in taken:
            arguments["position_embeddings"] = self._rotary(rows.shape[1] - _LEADING, rows)
        self._shared.clear()
        return [(stock(rows, **arguments), self(rows, **arguments))]


class PackedLayer(Layer):
    """Attends within segments of packed patches."""

    forms: ClassVar[Sequence[Form]] = (PLAIN, ROTARY)

    def __init__(self, stock: nn.Module, attention: Selection, shared: Shared, *, first: bool) -> None:
        """Raises NotFusable."""
        super().__init__(stock, shared, first=first)
        self._attention = attention
        self.known_arguments = _KNOWN.get(self.form)

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
        (rows,), rotary = hidden_states, None
        if position_embeddings:
            cos, sin = (each.reshape(len(rows), -1).contiguous() for each in position_embeddings)
            rotary = cos, sin
        return self._packed(rows, cu_seq_lens_q, max_length_q, rotary)[None]

    def compared(self, stock: nn.Module, rows: Tensor) -> list[tuple[Tensor, Tensor]]:
        units, tokens = rows.shape[:2]
        ends = torch.arange(0, (units + 1) * tokens, tokens, dtype=torch.int32, device=rows.device)
        packed, rotary, pairs = rows.flatten(0, 1), self._rotary(units * tokens, rows), []
        for longest in self._attention.lengths:
            self._shared.clear()
            expected, got = self._both(stock, packed, ends, longest, rotary)
            pairs.append((expected.view(rows.shape), got.view(rows.shape)))
        return pairs

    def _both(
        self, stock: nn.Module, rows: Tensor, ends: Tensor, longest: int, rotary: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Outputs of the stock layer and this one for packed rows."""
        packed = rows[None]
        arguments: dict[str, Any] = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
        arguments |= {"max_length_q": longest, "max_length_k": longest}
        if self.form is ROTARY:
            arguments |= {"attention_mask": None, "position_embeddings": rotary}
            return stock(packed, **arguments), self(packed, **arguments)
        layers: list[Any] = [stock]
        return packed_layers(layers, packed, self._attention.implementation, arguments), self(packed, **arguments)

    def _packed(self, rows: Tensor, ends: Tensor, longest: int, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
        """The forward on `rows (patches, hidden)` of segments with these boundaries."""
        chosen, segments = self._attention.at(longest), Segments(ends, longest)

        def attend(qkv: Tensor) -> Tensor:
            heads = rotate(qkv, *rotary, contain=not chosen.isolates) if rotary else qkv.unbind(1)
            q, k, v = self._normed(*heads)
            tiles = self._shared.of((id(ends), longest), lambda: chosen.tiles(segments, q.shape))
            return chosen.attended(q, k, v, segments, self._scale, tiles=tiles, contained=rotary is not None)

        return self._computed(rows, attend)


class Block(PackedLayer):
    """As PackedLayer, in the signature of Qwen's blocks."""

    forms = OF_BLOCKS

    def __call__(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        cu_seqlens: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        max_seqlen: int,
        **_: object,
    ) -> Tensor:
        """The block's forward on `hidden_states (rows, hidden)`."""
        return self._packed(hidden_states, cu_seqlens, max_seqlen, position_embeddings)

    def _both(
        self, stock: nn.Module, rows: Tensor, ends: Tensor, longest: int, rotary: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        arguments: dict[str, Any] = {"cu_seqlens": ends, "position_embeddings": rotary, "max_seqlen": longest}
        return stock(rows, **arguments), self(rows, **arguments)


def _padded(cos: Tensor, sin: Tensor, tiles: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of `tiles * tokens` rows; tokens before the patches of a tile are not rotated."""
    leading = (tokens - len(cos), cos.shape[1])
    cosines = torch.cat([cos.new_ones(leading), cos]).repeat(tiles, 1)
    return cosines, torch.cat([sin.new_zeros(leading), sin]).repeat(tiles, 1)


def _either(module: nn.Module, *names: str) -> float:
    """The first of these numbers that a module has. Raises AttributeError."""
    for name in names:
        if hasattr(module, name):
            return float(getattr(module, name))
    raise AttributeError(f"{type(module).__name__} has none of {', '.join(names)}")
