"""Idefics 2 (Hugging Face)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vitwire_server.core.grids import Grid
from vitwire_server.core.items import Modality
from vitwire_server.core.models import Preprocessing, Resizing
from vitwire_server.towers.configs import Config
from vitwire_server.towers.family import Accepts, Family, Module, Parts, in_model
from vitwire_server.towers.layouts.raster import RasterFamily
from vitwire_server.towers.metadata import Kind, Rows
from vitwire_server.towers.processors.settings import BILINEAR, HALF, ProcessorFiles, bounded
from vitwire_server.towers.shared.fractions import fractional_positions
from vitwire_server.towers.shared.perceiver import resampled
from vitwire_server.towers.shared.resampled import QueriedTower
from vitwire_server.towers.shared.siglip import packed_layers


def _settings(files: ProcessorFiles, config: Config) -> dict[Modality, Preprocessing]:
    """The processor keeps sizes that are not multiples of a patch; what is left over is not encoded."""
    del config
    return {Modality.IMAGE: replace(bounded(files.image, (1, 1), HALF, BILINEAR), resizing=Resizing.OTHER)}


class Idefics2Tower(QueriedTower):
    """A ViT whose learned positions are chosen by fractions of an image's sides, then a perceiver resampler."""

    def __init__(self, family: RasterFamily, parts: Parts, config: Config) -> None:
        self._connector: Any = parts["connector"]
        super().__init__(family, parts, config, queries=self._connector.perceiver_resampler.n_latents)

    @property
    def resampler_heads(self) -> tuple[int, int]:
        """See Tower."""
        config: Config = self._connector.perceiver_resampler.config
        return config.resampler_n_heads, config.resampler_head_dim

    def use_attention(self, implementation: str) -> None:
        """See Tower. The resampler's configuration is its own."""
        super().use_attention(implementation)
        self._connector.perceiver_resampler.config._attn_implementation = implementation  # noqa: SLF001

    def _inputs(self) -> dict[str, Kind]:
        return {"positions": Rows((), torch.int64)}

    def _compute(self, grid: Grid) -> dict[str, Tensor]:
        positions = fractional_positions(grid.h, grid.w, self.model.embeddings.num_patches_per_side)
        return {**super()._compute(grid), "positions": positions.repeat(grid.t)}

    def _rows(self, pixels: Tensor, tensors: Mapping[str, Tensor], attended: Mapping[str, Any]) -> Tensor:
        model, side = self.model, self.geometry.patch
        implementation = model.config._attn_implementation  # noqa: SLF001 - set by use_attention
        patches = model.embeddings.patch_embedding(pixels.view(len(pixels), -1, side, side)).flatten(1)
        states = (patches + model.embeddings.position_embedding(tensors["positions"])).unsqueeze(0)
        states = packed_layers(model.encoder.layers, states, implementation, attended)
        context = self._connector.modality_projection(model.post_layernorm(states[0]))
        return resampled(self._connector.perceiver_resampler, context, attended)


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
