"""Fused blocks whose linear layers are in float8: norms and activations write float8 rows and their scales.

A block ends with the first norm of the block after it, which takes the sum of the residual stream in the same kernel.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from vitwire_server.runtime.attention.selection import Selection
from vitwire_server.runtime.fused.blocks import NotFusable, TileCache, fuse
from vitwire_server.runtime.fused.mlps import mlp_parts
from vitwire_server.runtime.kernels.activations import KINDS, activation_name
from vitwire_server.runtime.kernels.attention import segment_attention
from vitwire_server.runtime.kernels.norms import epsilon
from vitwire_server.runtime.kernels.quantise import activate_quantise, add_norm_quantise
from vitwire_server.runtime.kernels.rotary import rotate
from vitwire_server.runtime.kernels.scaled import Scaled
from vitwire_server.runtime.precision.float8 import Float8Linear

_TOLERANCE = 2**-3
"""Accepted relative difference to unfused layers in float8: that of a value which is rounded to the other side. Fused
blocks round to bfloat16 in other places, and each layer in float8 enlarges such differences."""


class Float8Block:
    """As `blocks.Block`, for blocks that `float8.reduce` has changed."""

    def __init__(self, stock: nn.Module, attention: Selection, tiles: TileCache, *, first: bool, **_: object) -> None:
        """Raises NotFusable."""
        try:
            stock_attention: Any = stock.attn
            self._norms: tuple[nn.Module, nn.Module] = stock.norm1, stock.norm2  # type: ignore[assignment]
            self._qkv, self._proj = stock_attention.qkv, stock_attention.proj
            self._heads, self._scale = stock_attention.num_heads, float(stock_attention.scaling)
            for norm in self._norms:
                epsilon(norm)
            *layers, act, self._last = mlp_parts(stock.get_submodule("mlp"))
            self._kind, self._gated = str(activation_name(act)), len(layers) > 1
            if self._kind not in KINDS:
                raise ValueError(f"unknown activation {type(act).__name__}")
            if not all(isinstance(layer, Float8Linear) for layer in (self._qkv, *layers, self._last)):
                raise ValueError("only some of its layers are in float8")
            self._inner = Float8Linear.joined(*layers) if self._gated else layers[0]
        except (AttributeError, ValueError, KeyError) as error:
            raise NotFusable(str(error)) from error
        extras = {name for name, _ in stock_attention.named_children()} - {"qkv", "proj"}
        if extras:
            raise NotFusable(f"attention has {', '.join(sorted(extras))}")
        self._attention, self._tiles, self._first = attention, tiles, first
        self._next: Float8Block | None = None
        self._entered: tuple[Tensor, Scaled] | None = None
        """What the block before left: the residual stream, and its first norm."""

    def precede(self, following: "Float8Block") -> None:
        """Compute the first norm of the block that follows."""
        self._next = following

    def new_boundaries(self) -> None:
        """Use new boundaries from now on, outside of a whole forward."""
        self._tiles.clear()

    def __call__(
        self,
        hidden_states: Tensor,
        cu_seqlens: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        max_seqlen: int,
        **_: object,
    ) -> Tensor:
        """The block's forward on `hidden_states (rows, hidden)`, in the signature of transformers."""
        if self._first:
            self._tiles.clear()
        cos, sin = position_embeddings
        hidden, rows = self._enter(hidden_states)
        qkv = self._qkv(rows).view(len(hidden), 3, self._heads, -1)
        chosen = self._attention.at(max_seqlen)
        rotate(qkv, cos, sin, contain=not chosen.isolates)
        q, k, v = qkv.unbind(1)
        if chosen.name == "triton":
            tiles = self._tiles.of(cu_seqlens, len(hidden), self._heads, max_seqlen)
            attended = segment_attention(q, k, v, cu_seqlens, max_seqlen, self._scale, tiles)
        else:
            attended = chosen.attend(q, k, v, cu_seqlens, max_seqlen, self._scale)
        added = self._proj(attended.view(len(hidden), -1))
        hidden, rows = add_norm_quantise(hidden, added, self._norms[1], ahead=self._last.bias)
        inner = activate_quantise(self._inner(rows), self._kind, gated=self._gated)
        return self._leave(hidden, self._last.product(inner, biased=False))

    def _enter(self, hidden: Tensor) -> tuple[Tensor, Scaled]:
        entered, self._entered = self._entered, None
        if entered and entered[0] is hidden:
            return entered
        return add_norm_quantise(hidden, None, self._norms[0])

    def _leave(self, hidden: Tensor, added: Tensor) -> Tensor:
        if self._next is None:
            return hidden.add_(added)
        self._next._entered = add_norm_quantise(hidden, added, self._next._norms[0])  # noqa: SLF001 - its own class
        return self._next._entered[0]  # noqa: SLF001 - as above


def fuse_float8(blocks: Sequence[nn.Module], attention: Selection) -> int:
    """As `fuse`, for blocks that `float8.reduce` has changed."""
    fused = fuse(blocks, attention, Float8Block, _TOLERANCE)
    own: list[Float8Block] = [block.forward.__self__ for block in blocks[:fused]]  # type: ignore[attr-defined]
    for one, following in pairwise(own):
        one.precede(following)
    return fused
