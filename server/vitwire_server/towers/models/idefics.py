"""Idefics 2 and 3 and SmolVLM (Hugging Face), and retrieval models: ModernVBERT (Illuin), UltraVBERT."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vitwire_server.core.grids import Grid
from vitwire_server.core.items import Modality
from vitwire_server.core.models import Preprocessing
from vitwire_server.core.tilings import Overview, Tiling, TilingRule
from vitwire_server.towers.configs import Config, require
from vitwire_server.towers.family import Accepts, Parts, in_model
from vitwire_server.towers.layouts.raster import RasterFamily
from vitwire_server.towers.layouts.tiles import TileFamily, side
from vitwire_server.towers.metadata import Kind, Rows
from vitwire_server.towers.processors.settings import (
    BILINEAR,
    HALF,
    LANCZOS,
    ProcessorFiles,
    images,
    square,
    unsized,
    whole,
)
from vitwire_server.towers.processors.tiles import tiled
from vitwire_server.towers.shared.learned import fractional_positions, positioned
from vitwire_server.towers.shared.parts import Constants, part, projector, stock, variant
from vitwire_server.towers.shared.projected_tiles import ProjectedTiles, whole_squares
from vitwire_server.towers.shared.resamplers import QueriedTower, resampled
from vitwire_server.towers.shared.siglip import packed_layers, siglip

_TILE, _LONGEST = 364, 4 * 364
"""Sizes if a checkpoint's files give none."""
_LARGEST = 4096
"""The processor bounds images to this side after resizing them, which is supported only if that changes nothing."""


def _tiling(files: Mapping[str, Any], size: Mapping[str, Any], config: Config, *, cut: bool) -> Tiling:
    tile = side(config.vision_config.image_size)
    require("max_image_size", square(files, "max_image_size", _TILE), tile, field="the tower's image_size")
    longest = size.get("longest_edge") if isinstance(size, Mapping) else None
    if not isinstance(longest, int) or not 1 <= longest <= _LARGEST:
        raise ValueError(f"size.longest_edge is {longest!r}, but must be from 1 to {_LARGEST}")
    return Tiling(
        TilingRule.WHOLE_TILES,
        (tile, tile),
        overview=Overview.LAST if cut else Overview.NONE,
        max_tiles=(-(-longest // tile)) ** 2 if cut else 1,
        max_side=longest,
    )


def _images(image: Mapping[str, Any], config: Config) -> Preprocessing:
    size = image.get("size") or {"longest_edge": _LONGEST}
    tiling = _tiling(image, size, config, cut=bool(image.get("do_image_splitting", True)))
    return tiled(image, tiling, HALF, LANCZOS)


def _images_and_clips(files: ProcessorFiles, config: Config) -> dict[Modality, Preprocessing]:
    """Frames are never cut. A size for frames under `video_sampling` counts only if the file has no `size`."""
    video = files.own_video or files.image
    sampled = (video.get("video_sampling") or {}).get("video_size")
    size = dict(video.get("size") or sampled or {"longest_edge": _LONGEST})
    size["longest_edge"] = min(whole(size, "longest_edge", 0), _LARGEST)
    frames = tiled(files.video, _tiling(files.video, size, config, cut=False), HALF, LANCZOS)
    return {Modality.IMAGE: _images(files.image, config), Modality.VIDEO: frames}


class Idefics2Tower(QueriedTower):
    """A ViT whose learned positions are chosen by fractions of an image's sides, then a perceiver resampler."""

    def __init__(self, family: RasterFamily, parts: Parts, config: Config) -> None:
        self._connector: Any = parts["connector"]
        super().__init__(family, parts, config, queries=self._connector.perceiver_resampler.n_latents)
        sizes: Config = self._connector.perceiver_resampler.config
        self.resampler_heads = sizes.resampler_n_heads, sizes.resampler_head_dim

    def use_attention(self, implementation: str) -> None:
        """See Tower. The resampler has a configuration of its own."""
        super().use_attention(implementation)
        self._connector.perceiver_resampler.config._attn_implementation = implementation  # noqa: SLF001

    def _inputs(self) -> dict[str, Kind]:
        return {"positions": Rows((), torch.int64)}

    def _compute(self, grid: Grid) -> dict[str, Tensor]:
        positions = fractional_positions(grid.h, grid.w, self.model.embeddings.num_patches_per_side)
        return {**super()._compute(grid), "positions": positions.repeat(grid.t)}

    def _rows(self, pixels: Tensor, tensors: Mapping[str, Tensor], attended: Mapping[str, Any]) -> Tensor:
        model = self.model
        states = positioned(model.embeddings, pixels, tensors["positions"], self.geometry.patch)
        states = packed_layers(model.encoder.layers, states, model.config._attn_implementation, attended)  # noqa: SLF001 - set by use_attention
        context = self._connector.modality_projection(model.post_layernorm(states[0]))
        return resampled(self._connector.perceiver_resampler, context, attended)


class Idefics3(ProjectedTiles):
    """A ViT whose learned positions are chosen by fractions of a tile's sides, then pixel shuffle and one layer.

    Every tile is full, so its positions are constants and nothing is masked.
    """

    def __init__(self, parts: Parts, config: Config) -> None:
        super().__init__(parts, config, merged_by="scale_factor")
        patches = self.tile.width // self.patch
        places = fractional_positions(patches, patches, self._tower.embeddings.num_patches_per_side)
        self._constants: Any = Constants(places=places[None].to(self._tower.device))
        self.model["constants"] = self._constants

    def features(self, tiles: Tensor) -> Tensor:
        tower, embeddings = self._tower, self._tower.embeddings
        patches = embeddings.patch_embedding(tiles).flatten(2).transpose(1, 2)
        states = patches + embeddings.position_embedding(self._constants.places)
        return tower.post_layernorm(tower.encoder(inputs_embeds=states, attention_mask=None).last_hidden_state)  # type: ignore[no-any-return]


_CONNECTOR = in_model("connector.")
_SHUFFLED = (whole_squares("pixel_shuffle_factor"),)

_IDEFICS3 = TileFamily(
    "idefics3",
    "Idefics 3, SmolVLM",
    tower=stock("idefics3.Idefics3VisionTransformer", in_model("vision_model.")),
    beside=projector("idefics3.Idefics3Connector", _CONNECTOR),
    encoder=Idefics3,
    processor=images(_images),
)

_MODERNVBERT = variant(
    _IDEFICS3,
    "modernvbert",
    "ModernVBERT",
    tower=siglip("vision_model."),
    beside=projector("modernvbert.ModernVBertConnector", _CONNECTOR, served=_SHUFFLED),
    encoder=partial(ProjectedTiles, merged_by="pixel_shuffle_factor"),
    transformers="5.23.0",
)

ROWS = (
    RasterFamily(
        "idefics2",
        "Idefics 2",
        tower=stock("idefics2.Idefics2VisionTransformer", in_model("vision_model.")),
        beside={"connector": part("idefics2.Idefics2Connector", _CONNECTOR)},
        forward=Idefics2Tower,
        # The processor keeps sizes that are not multiples of a patch; what is left over is not encoded.
        processor=images(lambda image, _: unsized(image, HALF, BILINEAR)),
        images=Accepts.PIXELS,
    ),
    _IDEFICS3,
    variant(
        _IDEFICS3,
        "smolvlm",
        "SmolVLM2",
        video_processor="SmolVLM",
        tower=stock("smolvlm.SmolVLMVisionTransformer", in_model("vision_model.")),
        beside=projector("smolvlm.SmolVLMConnector", _CONNECTOR),
        processor=_images_and_clips,
        videos=Accepts.PICTURES,
    ),
    _MODERNVBERT,
    _MODERNVBERT.nested("vlm.", "colmodernvbert", "ColModernVBERT", within="vlm_config"),
    variant(
        _MODERNVBERT,
        "ultravbert",
        "UltraVBERT",
        beside=projector("ultravbert.UltraVBertConnector", _CONNECTOR, served=_SHUFFLED),
        # The processor shrinks an image until it has few enough tiles.
        processor=images(lambda image, _: unsized(image, HALF, LANCZOS)),
        images=Accepts.PIXELS,
    ),
)
