"""Poolers: parts that make one row of the tokens of an image, or of a packed segment."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from vitwire_server.core.pooling import Pooling
from vitwire_server.towers.configs import Config
from vitwire_server.towers.family import Module, Parts, Pool, Pooler, always

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


def class_token(
    *, norm: str | None = None, projected: bool = False, offered: Callable[[Config], bool] = always
) -> Pooler:
    """The class token of a tile, after `norm`, the tower's module that is applied to it alone, if there is one."""

    def make(parts: Parts, _: Config) -> Pool:
        normed = parts["tower"].get_submodule(norm) if norm else nn.Identity()
        return _projected(parts, lambda leading, _: normed(leading[:, 0]))

    return Pooler(pooling=Pooling.CLS, make=make, modules=PROJECTION if projected else {}, offered=offered)


def attention(head: Module, *, projected: bool = False) -> Pooler:
    """Pooling of a tile by a stock head, which not every checkpoint has."""

    def make(parts: Parts, _: Config) -> Pool:
        pooling_head = parts["head"]
        return _projected(parts, lambda _, patches: pooling_head(patches))

    modules = {"head": head, **(PROJECTION if projected else {})}
    return Pooler(pooling=Pooling.ATTENTION, make=make, modules=modules, offered=lambda config: bool(config.has_head))


def _projected(parts: Parts, row: Callable[[Tensor, Tensor], Tensor]) -> Pool:
    """A pool of tiles whose row is projected if the projection was loaded."""
    if "projection" not in parts:
        return Pool(_columns(parts), row)
    projection = parts["projection"]
    return Pool(projection.out_features, lambda leading, patches: projection(row(leading, patches)))


def _columns(parts: Parts) -> int:
    columns: int = parts["tower"].config.hidden_size
    return columns


MEAN = Pooler(pooling=Pooling.MEAN, make=lambda parts, _: Pool(_columns(parts), lambda _, patches: patches.mean(dim=1)))
"""The mean of the rows of a tile's patches."""


def segment_means(parts: Parts, _: Config) -> Pool:
    """The mean of the rows of each segment."""

    def row(rows: Tensor, boundaries: Tensor, longest: int) -> Tensor:
        counts = boundaries.diff().clamp_min(1).unsqueeze(1)
        return (summed(rows.float(), boundaries, longest) / counts).to(rows.dtype)

    return Pool(_columns(parts), row)


def segment_attention(parts: Parts, _: Config) -> Pool:
    """SigLIP's pooling head over packed segments: a learned query attends to the rows of each.

    Scores and sums are computed in float32.
    """
    head: Any = parts["head"]

    def row(rows: Tensor, boundaries: Tensor, longest: int) -> Tensor:
        attention = head.attention
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
        return states + head.mlp(head.layernorm(states))  # type: ignore[no-any-return]

    return Pool(_columns(parts), row)


def numbers(boundaries: Tensor, count: int) -> Tensor:
    """The number of the segment of each of `count` rows; rows behind the last segment count as one more."""
    places = torch.arange(count, dtype=boundaries.dtype, device=boundaries.device)
    return torch.searchsorted(boundaries, places, right=True) - 1


def summed(rows: Tensor, boundaries: Tensor, longest: int) -> Tensor:
    """The sum of the rows of each segment, of at most `longest` rows: chunks are summed, then their sums, and so on.

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
    """Rows at these places; zeros if nothing is held there."""
    found = rows[places.clamp(max=len(rows) - 1)]
    return found.masked_fill(~held.view(*held.shape, *[1] * (rows.ndim - 1)), 0)
