"""Fused blocks of a tower: eight launches instead of about thirty, with our kernels around the matrix products.

Blocks of the usual form (norm, attention, add, norm, MLP, add) are replaced by the same arithmetic with no more
roundings. Each is compared with the stock block before it is used.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from triton import TritonError

from vitwire_server.runtime.attention.selection import Selection
from vitwire_server.runtime.fused.mlps import joined, mlp_of
from vitwire_server.runtime.kernels.attention import segment_attention, segment_tiles
from vitwire_server.runtime.kernels.norms import add_norm, epsilon
from vitwire_server.runtime.kernels.rotary import rotate
from vitwire_server.runtime.products.tuned import Products

_log = logging.getLogger(__name__)
_SEGMENTS = (48, 16)
_TOLERANCE_ULPS = 4
"""Accepted relative difference to the stock block, in units in the last place."""
_FLOAT32_TOLERANCE = 1e-5
"""Accepted relative difference from summing in another order in float32."""


_PROJECTIONS = (("qkv",), ("q_proj", "k_proj", "v_proj"), ("q", "k", "v"))
"""Names of the layers for queries, keys and values."""


class NotFusable(Exception):
    """A block does not have the supported form; the message says how it differs."""


class KernelFailed(NotFusable):
    """A block has the supported form, but Triton or the device failed; the message says how."""


class TileCache:
    """The tiles of the attention kernel, computed once per forward and shared by its layers, and their products."""

    def __init__(self) -> None:
        self.products = Products()
        self._tiles: dict[int, Tensor] = {}

    def clear(self) -> None:
        """Start a new forward: the same boundary tensors may have new values."""
        self._tiles.clear()

    def of(self, boundaries: Tensor, rows: int, heads: int, longest: int) -> Tensor:
        """The tiles of these boundaries; boundaries must stay alive during the forward."""
        if id(boundaries) not in self._tiles:
            self._tiles[id(boundaries)] = segment_tiles(boundaries, rows, heads, longest)
        return self._tiles[id(boundaries)]


class Block:
    """A block of the usual form over packed segments."""

    def __init__(self, stock: nn.Module, attention: Selection, tiles: TileCache, *, first: bool) -> None:
        """Raises NotFusable."""
        self._products = tiles.products
        try:
            stock_attention: Any = stock.attn
            self._norms: tuple[nn.Module, nn.Module] = stock.norm1, stock.norm2  # type: ignore[assignment]
            self._proj = stock_attention.proj
            self._heads, self._scale = stock_attention.num_heads, float(stock_attention.scaling)
            for norm in self._norms:
                epsilon(norm)
            self._mlp = mlp_of(stock.get_submodule("mlp"), self._products)
            names = {name for name, _ in stock_attention.named_children()} - {"proj"}
            projections = next((each for each in _PROJECTIONS if names == set(each)), None)
            if projections is None:
                raise ValueError(f"attention has {', '.join(sorted(names))}")
            self._weight, self._bias = joined(*(getattr(stock_attention, name) for name in projections))
        except (AttributeError, ValueError, KeyError) as error:
            raise NotFusable(str(error)) from error
        if len(self._weight) != 3 * self._proj.in_features:
            raise NotFusable("keys have fewer heads than queries")
        self._products.register(self._weight, self._proj.weight)
        self._attention = attention
        self._tiles = tiles
        self._first = first

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
        first, second = self._norms
        hidden, normed = add_norm(hidden_states, None, first, overlapping=True)
        qkv = self._products.linear(normed, self._weight, self._bias).view(len(hidden), 3, self._heads, -1)
        chosen = self._attention.at(max_seqlen)
        rotate(qkv, cos, sin, contain=not chosen.isolates)
        q, k, v = qkv.unbind(1)
        if chosen.name == "triton":
            tiles = self._tiles.of(cu_seqlens, len(hidden), self._heads, max_seqlen)
            attended = segment_attention(q, k, v, cu_seqlens, max_seqlen, self._scale, tiles)
        else:
            attended = chosen.attend(q, k, v, cu_seqlens, max_seqlen, self._scale)
        attended = attended.view(len(hidden), -1)
        hidden, normed = self._products.add_norm(hidden, attended, self._proj, second, self._mlp.last.bias)
        return self._products.add(hidden, self._mlp.inner(normed), self._mlp.last.weight)


class FusedBlock(Protocol):
    """The forward of a block, in the signature of transformers."""

    def __call__(
        self,
        hidden_states: Tensor,
        cu_seqlens: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        max_seqlen: int,
        **_: object,
    ) -> Tensor:
        """The block's forward on `hidden_states (rows, hidden)`."""
        ...

    def new_boundaries(self) -> None:
        """Use new boundaries from now on, outside of a whole forward."""
        ...


@torch.inference_mode()
def fuse(
    blocks: Sequence[nn.Module],
    attention: Selection,
    form: Callable[..., FusedBlock] = Block,
    tolerance: float = 0.0,
) -> int:
    """Replace the forward of blocks by one of `form`, up to the first that cannot be fused; returns their number.

    `tolerance` is the accepted relative difference if that is more than a few units in the last place.
    """
    fused = 0
    tiles = TileCache()
    for stock in blocks:
        try:
            block = form(stock, attention, tiles, first=not fused)
            errors = [_difference(stock, block, longest) for longest in attention.lengths]
        except NotFusable as error:
            level = logging.WARNING if isinstance(error, KernelFailed) else logging.INFO
            _log.log(level, "blocks of type %s are not fused: %s", type(stock).__name__, error)
            return fused
        if not all(each <= max(tolerance, tolerance_of(stock)) for each in errors):  # False for NaN
            _log.warning("fused %s is not used: relative errors %s", type(stock).__name__, errors)
            return fused
        stock.forward = block.__call__
        fused += 1
    return fused


def tolerance_of(stock: nn.Module) -> float:
    """The accepted relative difference to a stock block."""
    return max(_FLOAT32_TOLERANCE, _TOLERANCE_ULPS * torch.finfo(next(stock.parameters()).dtype).eps)


@contextmanager
def comparing() -> Iterator[None]:
    """Failures of kernels and of the device become KernelFailed, those of another form NotFusable."""
    try:
        yield
    except (RuntimeError, TritonError) as error:
        raise KernelFailed(_first_line(error)) from error
    except (TypeError, ValueError, AttributeError) as error:
        raise NotFusable(_first_line(error)) from error


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


def _difference(stock: nn.Module, block: FusedBlock, longest: int) -> float:
    """Relative error, in norm, of what the block adds to random rows, compared with the stock block."""
    weight = next(stock.parameters())
    attention: Any = stock.attn
    columns, head_dim = attention.proj.out_features, attention.proj.in_features // attention.num_heads
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(sum(_SEGMENTS), columns, generator=generator).to(weight)
    angles = (torch.rand(len(rows), head_dim // 2, generator=generator) * 6).to(weight.device).repeat(1, 2)
    ends = torch.tensor([0, *torch.tensor(_SEGMENTS).cumsum(0).tolist()], dtype=torch.int32, device=weight.device)
    arguments: dict[str, Any] = {
        "cu_seqlens": ends,
        "position_embeddings": (angles.cos(), angles.sin()),
        "max_seqlen": longest,
    }
    block.new_boundaries()
    with comparing():
        expected = stock(rows, **arguments).float() - rows.float()
        got = block(rows, **arguments).float() - rows.float()
    return float((got - expected).norm() / expected.norm())
