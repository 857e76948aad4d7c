"""Towers followed by a resampler: learned queries of each image attend to its patches, and become its rows."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.idefics2.modeling_idefics2 import Idefics2PerceiverResampler

from vitwire_server.core.capacities import Capacities, ResampledCapacities
from vitwire_server.core.footprints import Footprints, ResampledFootprints
from vitwire_server.core.geometries import ResampledGeometry
from vitwire_server.core.grids import Grid
from vitwire_server.core.models import Geometry
from vitwire_server.towers.configs import Config
from vitwire_server.towers.family import Parts
from vitwire_server.towers.layouts.patches import attend
from vitwire_server.towers.layouts.raster import RasterFamily, RasterTower, places
from vitwire_server.towers.metadata import Capacity, Kind, Rows

LONGEST_SIDE = 1024
"""Patches a side of an image at most: positions are looked up in a table."""
_HEAD = 128
_EPSILON = 1e-6


class QueriedTower(RasterTower):
    """A resampler makes `queries` rows of each segment, which are known before the tower is. Budgets count patches."""

    def __init__(self, family: RasterFamily, parts: Parts, config: Config, *, queries: int) -> None:
        self._queries = queries
        super().__init__(family, parts, config)

    def _geometry(self, config: Config) -> Geometry:
        return ResampledGeometry(**asdict(super()._geometry(config)))

    @cached_property
    def footprint(self) -> Footprints:
        return ResampledFootprints(self._queries)

    @cached_property
    def capacities(self) -> Capacities:
        return ResampledCapacities(self._queries)

    def sizes(self, most: int) -> list[int]:
        return [tokens for tokens in super().sizes(most) if tokens >= self._queries]

    def rows(self, capacity: Capacity) -> int:
        return capacity.segments * self._queries


class Resampler(nn.Module):
    """One layer of cross attention, with keys that know the row and column of their patch.

    Queries are the same for every image.
    """

    waves: Tensor

    def __init__(self, config: Config) -> None:
        """`config` is the whole checkpoint's."""
        super().__init__()
        width, patch_width = config.text_config.hidden_size, config.vision_config.hidden_size
        self.query = nn.Parameter(torch.zeros(config.query_num, width))
        self.kv_proj = nn.Identity() if patch_width == width else nn.Linear(patch_width, width, bias=False)
        self.attn = nn.MultiheadAttention(width, width // _HEAD)
        self.ln_q, self.ln_kv, self.ln_post = (nn.LayerNorm(width, eps=_EPSILON) for _ in range(3))
        self.proj = nn.Parameter(torch.zeros(width, width))
        self.register_buffer("waves", _waves(width // 2), persistent=False)

    def forward(self, states: Tensor, places: Tensor, segments: int, attended: Callable[..., Tensor]) -> Tensor:
        """`states (patches, C)` at these places to rows `(segments * queries, width)`.

        `attended` returns what queries `(rows, heads, head_dim)` get of the keys and values of their segment.
        """
        values = self.ln_kv(self.kv_proj(states))
        down, across = self.waves[places].unbind(1)
        keys = values + torch.cat([across, down], dim=-1).to(values.dtype)
        weights, biases = self.attn.in_proj_weight.chunk(3), self.attn.in_proj_bias.chunk(3)
        inputs = (self.ln_q(self.query), keys, values)
        query, key, value = (
            functional.linear(*each).unflatten(-1, (-1, _HEAD)) for each in zip(inputs, weights, biases, strict=True)
        )
        taken = attended(query.repeat(segments, 1, 1), key, value).flatten(1)
        rows: Tensor = self.ln_post(self.attn.out_proj(taken)) @ self.proj
        return rows


def _waves(width: int) -> Tensor:
    """Sines, then cosines, of each place along an axis, `(LONGEST_SIDE, width)`, by numpy as published."""
    frequencies = np.arange(width // 2, dtype=np.float32)
    frequencies /= width / 2.0
    angles = np.outer(np.arange(LONGEST_SIDE, dtype=np.float32), 1.0 / 10000**frequencies)
    return torch.from_numpy(np.concatenate([np.sin(angles), np.cos(angles)], axis=-1)).float()


class ResampledTower(QueriedTower):
    """Its family names a `Resampler` among the modules next to the tower."""

    def __init__(self, family: RasterFamily, parts: Parts, config: Config) -> None:
        self._resampler: Resampler = parts["resampler"]
        super().__init__(family, parts, config, queries=len(self._resampler.query))
        self.resampler_heads = self._resampler.attn.num_heads, _HEAD

    def _geometry(self, config: Config) -> Geometry:
        return replace(super()._geometry(config), longest_side=LONGEST_SIDE)

    def _inputs(self) -> dict[str, Kind]:
        return {"places": Rows((2,), torch.int64)}

    def _compute(self, grid: Grid) -> dict[str, Tensor]:
        return {**super()._compute(grid), "places": places(grid)}

    def _resampled(self, states: Tensor, tensors: Mapping[str, Tensor], attended: Mapping[str, Any]) -> Tensor:
        """`states (patches, C)` to rows `(segments * queries, width)`; slots without a segment have no queries."""
        boundaries = tensors["cu_seqlens"]
        used = boundaries.diff() > 0
        ends = functional.pad(used.cumsum(0, dtype=boundaries.dtype) * self._queries, (1, 0))
        crossed = {**attended, "cu_seq_lens_q": ends, "max_length_q": self._queries}
        implementation = self.model.config._attn_implementation  # noqa: SLF001 - set by use_attention

        def taken(*heads: Tensor) -> Tensor:
            batch = [each.unsqueeze(0) for each in heads]
            return attend(self._resampler, implementation, batch, scaling=_HEAD**-0.5, **crossed)[0]

        rows: Tensor = self._resampler(states, tensors["places"], len(used), taken)
        return rows


def resampled(stock: Idefics2PerceiverResampler, context: Tensor, attended: Mapping[str, Any]) -> Tensor:
    """Rows of patches to latents `(segments * latents, width)`; every slot for a segment has its own.

    Latents attend to the patches of their segment and to each other: in the sequence of keys, a segment's latents lie
    behind its patches. Sizes are known in advance: segment `n` begins behind `n` times the latents.
    """
    ends, own = attended["cu_seq_lens_k"], stock.n_latents
    segments = torch.arange(len(ends), device=ends.device, dtype=ends.dtype)
    numbers = torch.arange(len(context), device=ends.device, dtype=ends.dtype)
    patches = numbers + torch.bucketize(numbers, ends[1:], right=True) * own
    firsts = ends[1:] + segments[:-1] * own
    places = (firsts[:, None] + torch.arange(own, device=ends.device)).flatten()
    crossed = {
        "cu_seq_lens_q": segments * own,
        "cu_seq_lens_k": ends + segments * own,
        "max_length_q": own,
        "max_length_k": attended["max_length_k"] + own,
    }
    latents = stock.latents.repeat(len(places) // own, 1)
    layers: Any = stock.layers
    for layer in layers:
        normed = layer.input_latents_norm(latents), layer.input_context_norm(context)
        latents = latents + _crossed(layer.self_attn, *normed, (places, patches), crossed)
        latents = latents + layer.mlp(layer.post_attention_layernorm(latents))
    rows: Tensor = stock.norm(latents)
    return rows


def _crossed(
    module: Any,  # noqa: ANN401 - a stock module
    latents: Tensor,
    context: Tensor,
    places: tuple[Tensor, Tensor],
    attended: Mapping[str, Any],
) -> Tensor:
    """A perceiver's attention, with latents and patches at these places; keys that queries share are copied."""

    def joined(projection: nn.Linear) -> Tensor:
        whole = latents.new_empty(len(context) + len(latents), projection.out_features)
        for rows, at in zip((latents, context), places, strict=True):
            whole = whole.index_copy(0, at, projection(rows))
        heads: Tensor = whole.unflatten(1, (-1, module.head_dim))
        return heads.repeat_interleave(module.num_heads // heads.shape[1], dim=1)

    query = module.q_proj(latents).unflatten(1, (-1, module.head_dim))
    heads = [each.unsqueeze(0) for each in (query, joined(module.k_proj), joined(module.v_proj))]
    implementation = module.config._attn_implementation  # noqa: SLF001 - set by use_attention
    rows = attend(module, implementation, heads, scaling=module.scaling, **attended)
    return module.o_proj(rows[0].flatten(1))  # type: ignore[no-any-return]
