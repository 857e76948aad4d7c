"""Idefics 2 (Hugging Face)."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import cached_property
from math import isqrt
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from vitwire_server.core.capacities import Capacities, PackedCapacities
from vitwire_server.core.footprints import Footprints, ResampledFootprints
from vitwire_server.core.grids import Grid
from vitwire_server.core.items import Modality
from vitwire_server.core.models import Geometry, Preprocessing, ResampledGeometry, Resizing
from vitwire_server.towers.configs import Config
from vitwire_server.towers.family import Accepts, Family, Module, Parts, in_model
from vitwire_server.towers.layouts.raster import RasterFamily, RasterTower
from vitwire_server.towers.metadata import Kind, Rows
from vitwire_server.towers.processors.settings import BILINEAR, HALF, ProcessorFiles, bounded
from vitwire_server.towers.shared.fractions import fractional_positions
from vitwire_server.towers.shared.perceiver import resampled


def _settings(files: ProcessorFiles, config: Config) -> dict[Modality, Preprocessing]:
    """The processor keeps sizes that are no whole patches; what is left over is not encoded."""
    del config
    return {Modality.IMAGE: replace(bounded(files.image, (1, 1), HALF, BILINEAR), resizing=Resizing.OTHER)}


class Idefics2Tower(RasterTower):
    """A ViT whose learned positions are chosen by fractions of an image's sides, then a perceiver resampler."""

    def __init__(self, family: RasterFamily, parts: Parts, config: Config) -> None:
        self._connector: Any = parts["connector"]
        self._queries: int = self._connector.perceiver_resampler.n_latents
        super().__init__(family, parts, config)

    def _geometry(self, config: Config) -> Geometry:
        return ResampledGeometry(**asdict(super()._geometry(config)), queries=self._queries)

    def use_attention(self, implementation: str) -> None:
        """See Tower. The resampler's configuration is its own."""
        super().use_attention(implementation)
        self._connector.perceiver_resampler.config._attn_implementation = implementation  # noqa: SLF001

    @cached_property
    def footprints(self) -> Footprints:  # type: ignore[override]
        """See Tower."""
        return ResampledFootprints(self._queries)

    @property
    def capacities(self) -> Capacities:
        """See Tower."""
        return PackedCapacities(self.geometry.merge, fewest=self._queries)

    def sizes(self, most: int) -> list[int]:
        """See Tower."""
        return [tokens for tokens in super().sizes(most) if tokens >= self._queries]

    def samples(self, tokens: int, items: int) -> list[Grid]:
        """See RasterTower. None has fewer patches than queries, so one of few tokens is larger than asked for."""
        least = isqrt(self._queries - 1) + 1
        return [grid for grid in super().samples(tokens, items) if grid.patches >= self._queries] or [
            Grid(1, least, least)
        ]

    def _inputs(self) -> dict[str, Kind]:
        return {"positions": Rows((), torch.int64)}

    def _compute(self, grid: Grid) -> dict[str, Tensor]:
        positions = fractional_positions(grid.h, grid.w, self.model.embeddings.num_patches_per_side)
        return {**super()._compute(grid), "positions": positions.repeat(grid.t)}

    def _rows(self, pixels: Tensor, tensors: Mapping[str, Tensor], attended: Mapping[str, Any]) -> Tensor:
        model, side = self.model, self.geometry.patch
        patches = model.embeddings.patch_embedding(pixels.view(len(pixels), -1, side, side)).flatten(1)
        states = patches + model.embeddings.position_embedding(tensors["positions"])
        for layer in model.encoder.layers:
            states = states + self._attention(layer.self_attn, layer.layer_norm1(states), attended)
            states = states + layer.mlp(layer.layer_norm2(states))
        context = self._connector.modality_projection(model.post_layernorm(states))
        rows = resampled(self._connector.perceiver_resampler, context, attended)[: len(pixels)]
        return functional.pad(rows, (0, 0, 0, len(pixels) - len(rows)))

    def _attention(self, module: Any, states: Tensor, attended: Mapping[str, Any]) -> Tensor:  # noqa: ANN401 - stock
        """The stock module keeps the boundaries from attention, so its projections are called one by one."""
        attend = ALL_ATTENTION_FUNCTIONS[self.model.config._attn_implementation]  # noqa: SLF001 - set by use_attention
        query, key, value = (
            projection(states).unflatten(-1, (module.num_heads, -1)).transpose(0, 1).unsqueeze(0)
            for projection in (module.q_proj, module.k_proj, module.v_proj)
        )
        rows, _ = attend(
            module, query, key, value, None, scaling=module.scale, dropout=0.0, is_causal=False, **attended
        )
        return module.out_proj(rows[0].flatten(1))  # type: ignore[no-any-return]


_IDEFICS2 = RasterFamily(
    model_type="idefics2",
    title="Idefics 2",
    architecture="27 x 1152, patch 14",
    tower=Module(source="idefics2.modeling_idefics2:Idefics2VisionTransformer", prefixes=in_model("vision_model.")),
    beside={
        "connector": Module(
            source="idefics2.modeling_idefics2:Idefics2Connector", prefixes=in_model("connector."), config=""
        )
    },
    width="text_config.hidden_size",
    forward=Idefics2Tower,
    layers="encoder.layers",
    processor=_settings,
    images=Accepts.PIXELS,
    videos=Accepts.NOTHING,
    special="a perceiver resampler makes 64 rows of an image",
)

ROWS: tuple[Family, ...] = (_IDEFICS2,)
