"""Poolers: parts that make one row of the tokens of an image, or of a packed segment."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from vitwire_server.core.pooling import Pooling
from vitwire_server.towers.configs import Config
from vitwire_server.towers.family import Module, Parts, Pooler, always

_CHUNK = 16
"""Rows that are summed at once."""

PROJECTION = {
    "projection": Module(
        source=nn.Linear,
        prefixes={"visual_projection.": ""},
        config="",
        arguments=lambda config: (
            getattr(config, "vision_config", config).hidden_size,
            config.projection_dim,
            False,
        ),
    )
}
"""To the space that images share with texts; transformers keeps it on the whole model."""


class _TilePool:
    """A pool whose row may be projected."""

    def __init__(self, parts: Parts, config: Config) -> None:
        del config
        self._tower: Any = parts["tower"]
        self._projection: Any = parts.get("projection", nn.Identity())
        self.width: int = parts["projection"].out_features if "projection" in parts else self._tower.config.hidden_size


class ClassToken(_TilePool):
    """The class token, after the norm that the tower applies to it alone, if there is one."""

    def __init__(self, parts: Parts, config: Config, *, norm: str | None) -> None:
        super().__init__(parts, config)
        self._norm = self._tower.get_submodule(norm) if norm else nn.Identity()

    def __call__(self, leading: Tensor, patches: Tensor) -> Tensor:
        del patches
        row: Tensor = self._projection(self._norm(leading[:, 0]))
        return row


class Mean(_TilePool):
    """The mean of the rows of the patches."""

    def __call__(self, leading: Tensor, patches: Tensor) -> Tensor:
        del leading
        return patches.mean(dim=1)


class Head(_TilePool):
    """The model's own pooling head."""

    def __init__(self, parts: Parts, config: Config) -> None:
        super().__init__(parts, config)
        self._head: Any = parts["head"]

    def __call__(self, leading: Tensor, patches: Tensor) -> Tensor:
        del leading
        row: Tensor = self._projection(self._head(patches))
        return row


def has_head(config: Config) -> bool:
    """Whether a checkpoint has the pooling head."""
    return bool(config.has_head)


def class_token(
    *, norm: str | None = None, projected: bool = False, offered: Callable[[Config], bool] = always
) -> Pooler:
    """`norm` is the tower's module that is applied to the class token alone."""
    modules = PROJECTION if projected else {}
    return Pooler(pooling=Pooling.CLS, make=partial(ClassToken, norm=norm), modules=modules, offered=offered)


MEAN = Pooler(pooling=Pooling.MEAN, make=Mean)


def attention(head: Module, *, projected: bool = False) -> Pooler:
    """Pooling by a stock head."""
    modules = {"head": head, **(PROJECTION if projected else {})}
    return Pooler(pooling=Pooling.ATTENTION, make=Head, modules=modules, offered=has_head)


class SegmentMean:
    """The mean of the rows of each segment."""

    def __init__(self, parts: Parts, config: Config) -> None:
        del config
        self.width: int = parts["tower"].config.hidden_size

    def __call__(self, rows: Tensor, boundaries: Tensor, longest: int) -> Tensor:
        counts = boundaries.diff().clamp_min(1).unsqueeze(1)
        return (summed(rows.float(), boundaries, longest) / counts).to(rows.dtype)


class SegmentAttention:
    """SigLIP's pooling head over packed segments: a learned query attends to the rows of each."""

    def __init__(self, parts: Parts, config: Config) -> None:
        del config
        self.width: int = parts["tower"].config.hidden_size
        self._head: Any = parts["head"]

    def __call__(self, rows: Tensor, boundaries: Tensor, longest: int) -> Tensor:
        """See SegmentPool. Scores and sums are computed in float32."""
        head, attention = self._head, self._head.attention
        weights, biases = attention.in_proj_weight.chunk(3), attention.in_proj_bias.chunk(3)
        query, keys, values = (
            functional.linear(states, weight, bias).unflatten(-1, (attention.num_heads, -1)).float()
            for states, weight, bias in zip((head.probe[0], rows, rows), weights, biases, strict=True)
        )
        scores = (query * keys).sum(-1) * query.shape[-1] ** -0.5
        segment = numbers(boundaries, len(rows))
        largest = scores.new_full((len(boundaries) - 1, scores.shape[-1]), -torch.inf)
        largest = largest.scatter_reduce(0, segment.unsqueeze(-1).expand_as(scores), scores, "amax")
        shares = (scores - largest[segment]).exp()
        totals = summed(shares, boundaries, longest).clamp_min(torch.finfo(torch.float32).tiny)
        attended = summed(shares.unsqueeze(-1) * values, boundaries, longest) / totals.unsqueeze(-1)
        states = attention.out_proj(attended.flatten(1).to(rows.dtype))
        pooled: Tensor = states + head.mlp(head.layernorm(states))
        return pooled


def numbers(boundaries: Tensor, count: int) -> Tensor:
    """The number of the segment of each of `count` rows; rows behind the last one have that of one more."""
    places = torch.arange(count, dtype=boundaries.dtype, device=boundaries.device)
    return torch.searchsorted(boundaries, places, right=True) - 1


def summed(rows: Tensor, boundaries: Tensor, longest: int) -> Tensor:
    """The sum of the rows of each segment, of at most `longest` rows: that of chunks, then of their sums, and so on.

    The order is fixed, so that replays of a graph return the same bits: adding rows to their segment by index would
    leave it to CUDA. No shape depends on values: chunks are as
    many as there could be, of which those left over hold no row. NaN and infinity stay in their segment.
    """
    segments = len(boundaries) - 1
    while longest > 1:
        lengths = boundaries.diff()
        ends = ((lengths + (_CHUNK - 1)) // _CHUNK).cumsum(0, dtype=boundaries.dtype)
        firsts = torch.cat([ends.new_zeros(1), ends])
        count = len(rows) // _CHUNK + segments
        own = numbers(firsts, count).clamp(max=segments - 1)
        chunks = torch.arange(count, dtype=boundaries.dtype, device=boundaries.device) - firsts[own]
        places = (boundaries[own] + chunks * _CHUNK)[:, None] + torch.arange(_CHUNK, device=boundaries.device)
        rows = _held(rows, places, places < boundaries[own + 1][:, None]).sum(1)
        boundaries, longest = firsts, -(-longest // _CHUNK)
    return _held(rows, boundaries[:-1].long(), boundaries.diff() > 0)


def _held(rows: Tensor, places: Tensor, held: Tensor) -> Tensor:
    """Rows at these places; zeros where nothing is held there."""
    found = rows[places.clamp(max=len(rows) - 1)]
    return found.masked_fill(~held.view(*held.shape, *[1] * (rows.ndim - 1)), 0)
