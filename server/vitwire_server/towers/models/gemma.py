"""Gemma 3, Gemma 4 and PaliGemma (Google), and models of other kinds that have their towers."""

from collections.abc import Mapping
from dataclasses import replace
from math import isqrt
from typing import Any

import torch
from torch import Tensor

from vitwire_server.core.grids import Grid
from vitwire_server.core.items import Modality
from vitwire_server.core.models import Geometry, Preprocessing, Resizing
from vitwire_server.core.tilings import Tiling, TilingRule
from vitwire_server.towers.configs import Config, Served
from vitwire_server.towers.family import Accepts, Parts, in_model
from vitwire_server.towers.layouts.patches import neighbours
from vitwire_server.towers.layouts.raster import RasterFamily, RasterTower, places
from vitwire_server.towers.layouts.tiles import TileFamily
from vitwire_server.towers.metadata import Kind, Rows, Sources
from vitwire_server.towers.processors.settings import BILINEAR, HALF, IDENTITY, ProcessorFiles, bounded_above, images
from vitwire_server.towers.processors.tiles import tile_of, tiled
from vitwire_server.towers.shared.parts import projector, stock, variant
from vitwire_server.towers.shared.projected_tiles import ProjectedTiles
from vitwire_server.towers.shared.siglip import siglip

_GEMMA4_TOKENS = {Modality.IMAGE: 280, Modality.VIDEO: 70}
_UNGROUPED = Served(
    "num_key_value_heads",
    lambda heads, vision: heads == vision.num_attention_heads,
    "num_attention_heads: grouped queries are unsupported",
)


def _gemma4_settings(files: ProcessorFiles, config: Config) -> dict[Modality, Preprocessing]:
    vision = config.vision_config
    factor = vision.patch_size * vision.pooling_kernel_size

    def of(modality: Modality, own: Mapping[str, Any]) -> Preprocessing:
        tokens = int(own.get("max_soft_tokens", _GEMMA4_TOKENS[modality]))
        return bounded_above(own, tokens * factor**2, factor, Resizing.MOST_TOKENS, IDENTITY)

    return {Modality.IMAGE: of(Modality.IMAGE, files.image), Modality.VIDEO: of(Modality.VIDEO, files.own_video)}


def _gemma3_settings(image: Mapping[str, Any], config: Config) -> Preprocessing:
    return tiled(image, Tiling(TilingRule.STRETCH, (config.vision_config.image_size,) * 2), HALF, BILINEAR)


def _pools(tokens: int, config: Config) -> bool:
    """True if pooling squares of patches leaves this number of tokens."""
    patches, side = config.vision_config.image_size // config.vision_config.patch_size, isqrt(tokens)
    return side**2 == tokens and patches // (patches // side) == side


class Gemma3(ProjectedTiles):
    """The projector pools patches to a fixed number of tokens."""

    def __init__(self, parts: Parts, config: Config) -> None:
        super().__init__(parts, config)
        side = isqrt(config.mm_tokens_per_image)
        self.merge = self.tile.width // self.patch // side
        self.tile = self.tile._replace(tokens=side**2)


class Gemma4Tower(RasterTower):
    """Learned and rotary positions by column and row; tokens are means of squares of patches."""

    def _geometry(self, config: Config) -> Geometry:
        own = super()._geometry(config)
        return replace(own, longest_side=self.model.config.position_embedding_size // own.merge * own.merge)

    def _inputs(self) -> dict[str, Kind]:
        return {"positions": Rows((2,), torch.int64), "squares": Sources(self.geometry.merge**2)}

    def _compute(self, grid: Grid) -> dict[str, Tensor]:
        squares = neighbours(grid, self.geometry.merge)
        return {**super()._compute(grid), "positions": places(grid).flip(1), "squares": squares}

    def _rows(self, pixels: Tensor, tensors: Mapping[str, Tensor], attended: Mapping[str, Any]) -> Tensor:
        """The stock tower sees no padding: rows that pad a budget are left out afterwards."""
        model, positions = self.model, tensors["positions"].unsqueeze(0)
        states = model.patch_embedder(pixels.unsqueeze(0), positions, positions.new_zeros((1, 1), dtype=torch.bool))
        rotary = model.encoder.rotary_emb(states, positions)
        for layer in model.encoder.layers:
            states = layer(states, position_embeddings=rotary, position_ids=positions, **attended)
        return self._projector(self._pooled(states[0], tensors["squares"]))  # type: ignore[no-any-return]

    def _pooled(self, states: Tensor, squares: Tensor) -> Tensor:
        """Means in float32, scaled; float16 would overflow."""
        model = self.model
        means = states[squares].float().mean(dim=1).to(states.dtype)
        rows: Tensor = means.float() * model.pooler.root_hidden_size
        if model.config.standardize:
            rows = (rows - model.std_bias.float()) * model.std_scale.float()
        return rows.to(states.dtype)


_IMAGES_ALONE: dict[str, Any] = {
    "processor": lambda files, config: {Modality.IMAGE: _gemma4_settings(files, config)[Modality.IMAGE]},
    "videos": Accepts.NOTHING,
    "transformers": "5.23.0",
}

_GEMMA4 = RasterFamily(
    "gemma4",
    "Gemma 4",
    video_processor="Gemma4",
    tower=stock("gemma4.Gemma4VisionModel", in_model("vision_tower."), served=(_UNGROUPED,)),
    beside=projector(
        "gemma4.Gemma4MultimodalEmbedder",
        in_model("embed_vision."),
        arguments=lambda config: (config.vision_config, config.text_config),
    ),
    forward=Gemma4Tower,
    merge="vision_config.pooling_kernel_size",
    channels_last=True,
    processor=_gemma4_settings,
    videos=Accepts.PICTURES,
)

_POOLS = Served("mm_tokens_per_image", _pools, "a square whose root divides image_size / patch_size")
_GEMMA3 = TileFamily(
    "gemma3",
    "Gemma 3",
    tower=siglip("vision_tower."),
    beside=projector("gemma3.Gemma3MultiModalProjector", served=(_POOLS,)),
    encoder=Gemma3,
    processor=images(_gemma3_settings),
)

_T5GEMMA2_ENCODER = variant(
    _GEMMA3,
    "t5gemma2_encoder",
    "T5Gemma 2 (encoder alone)",
    beside=projector("t5gemma2.T5Gemma2MultiModalProjector", served=(_POOLS,)),
)

_PALIGEMMA = TileFamily(
    "paligemma",
    "PaliGemma 1 and 2",
    tower=siglip("vision_tower."),
    beside=projector("paligemma.PaliGemmaMultiModalProjector"),
    encoder=ProjectedTiles,
    processor=images(lambda image, config: tile_of(image, config.vision_config.image_size, HALF, crops=False)),
)

ROWS = (
    _GEMMA4,
    variant(
        _GEMMA4,
        "diffusion_gemma",
        "DiffusionGemma",
        tower=replace(_GEMMA4.tower, prefixes=in_model("encoder.vision_tower.")),
        beside={"projector": replace(_GEMMA4.modules["projector"], prefixes=in_model("encoder.embed_vision."))},
        **_IMAGES_ALONE,
    ),
    variant(_GEMMA4, "embedding_gemma2", "EmbeddingGemma 2", **_IMAGES_ALONE),
    _GEMMA3,
    _GEMMA3.nested("model.", "shieldgemma2", "ShieldGemma 2"),
    _T5GEMMA2_ENCODER.nested("model.encoder.", "t5gemma2", "T5Gemma 2", within="encoder"),
    _T5GEMMA2_ENCODER,
    _PALIGEMMA,
    _PALIGEMMA.nested("vlm.", "colpali", "ColPali", within="vlm_config"),
)
