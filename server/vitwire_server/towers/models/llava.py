"""LLaVA 1.5, ViP-LLaVA, LLaVA-NeXT, LLaVA-NeXT-Video and LLaVA-OneVision, with CLIP's tower or SigLIP's."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import cached_property
from math import isqrt
from typing import Any

import torch
from torch import Tensor
from transformers.models.llava_next_video.modeling_llava_next_video import LlavaNextVideoPooler

from vitwire_server.core.footprints import PooledFrameFootprints
from vitwire_server.core.geometries import PooledFrameGeometry
from vitwire_server.core.grids import Grid
from vitwire_server.core.items import Modality
from vitwire_server.core.models import Preprocessing, Resizing
from vitwire_server.core.tilings import Overview, Tiling, TilingRule
from vitwire_server.towers.configs import Config, one_of, require
from vitwire_server.towers.family import Accepts, Parts
from vitwire_server.towers.layouts.assembled import AssembledEncoder, UnitInput
from vitwire_server.towers.layouts.tiles import TileFamily, Unit
from vitwire_server.towers.processors.settings import CLIP, HALF, ProcessorFiles, images, square
from vitwire_server.towers.processors.tiles import fits_tower, stretched, tile_of, tiled
from vitwire_server.towers.shared.parts import projector, variant
from vitwire_server.towers.shared.projected_tiles import ProjectedLayers, clip
from vitwire_server.towers.shared.siglip import siglip


def _settings(image: Mapping[str, Any], config: Config) -> Preprocessing:
    """CLIP's processor cuts out the middle unless its file says otherwise, SigLIP's has no such setting."""
    stretches = "Siglip" in (image.get("image_processor_type") or "")
    side, normalisation = config.vision_config.image_size, HALF if stretches else CLIP
    settings = tile_of(image, side, normalisation, crops=not stretches)
    # Pads images to squares before it resizes them, which no rule does.
    return replace(settings, resizing=Resizing.OTHER) if image.get("do_pad") else settings


def _best_fit(image: Mapping[str, Any], config: Config) -> Tiling:
    """The whole image, then its tiles in one of the listed layouts."""
    size = config.vision_config.image_size
    fits_tower(image, size)
    pinpoints = image.get("image_grid_pinpoints") or config.image_grid_pinpoints
    if any(length % size for pair in pinpoints for length in pair):
        raise ValueError(f"image_grid_pinpoints must be multiples of {size}")
    layouts = tuple((int(height) // size, int(width) // size) for height, width in pinpoints)
    return Tiling(
        TilingRule.BEST_FIT,
        (size, size),
        overview=Overview.FIRST,
        max_tiles=max(rows * columns for rows, columns in layouts),
        layouts=layouts,
    )


def _next_settings(image: Mapping[str, Any], config: Config) -> Preprocessing:
    side = config.vision_config.image_size
    require("crop_size", square(image, "crop_size", side), side, field="image_size")
    return tiled(image, _best_fit(image, config), CLIP)


def _onevision_settings(files: ProcessorFiles, config: Config) -> dict[Modality, Preprocessing]:
    tiling = _best_fit(files.image, config)
    frames = tiled(files.video, tiling, CLIP)
    return {Modality.IMAGE: tiled(files.image, tiling, CLIP), Modality.VIDEO: stretched(frames, tiling.tile)}


def _video_settings(files: ProcessorFiles, config: Config) -> dict[Modality, Preprocessing]:
    pictures = _next_settings(files.image, config)
    if pictures.tiling and (1, 1) in pictures.tiling.layouts:
        raise ValueError("unsupported image_grid_pinpoints with a single tile: the grid (2, 1, 1) is a clip")
    frames = tile_of(files.video, config.vision_config.image_size, CLIP)
    return {Modality.IMAGE: pictures, Modality.VIDEO: frames}


class LlavaNextVideo(ProjectedLayers, AssembledEncoder):
    """Every tile is projected twice, as it is and pooled: images are made of the former rows, clips of the latter."""

    def __init__(self, parts: Parts, config: Config) -> None:
        super().__init__(parts, config)
        self._pool = LlavaNextVideoPooler(config)
        tokens, longest = self.tile.tokens, (self.tile.height // self.patch) ** 2
        pooled = (isqrt(tokens) // config.spatial_pool_stride) ** 2
        self.unit = Unit(1, tokens, tokens + pooled, longest)
        self.inputs: Mapping[str, UnitInput] = {}
        self.footprint = PooledFrameFootprints(tokens, pooled, longest)

    @cached_property
    def geometry(self) -> PooledFrameGeometry:
        return PooledFrameGeometry(**asdict(super().geometry))

    def sample(self, units: int) -> Grid:
        return Grid(units, 1, max(1, units - 1))

    def lay(self, grid: Grid) -> tuple[Mapping[str, Tensor], Tensor]:
        rows = torch.arange(grid.t * self.unit.rows).view(grid.t, -1)
        of_clip = grid.h * grid.w == 1
        own = rows[:, self.unit.tokens :] if of_clip else rows[:, : self.unit.tokens]
        return {}, own.flatten()

    def encode_units(self, tiles: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        del inputs
        rows = self.features(tiles)
        return self.projected(torch.cat([rows, self._pool(rows)], dim=1))


_LLAVA = TileFamily(
    "llava",
    "LLaVA 1.5",
    tower=clip("vision_tower."),
    beside=projector("llava.LlavaMultiModalProjector"),
    encoder=ProjectedLayers,
    processor=images(_settings),
)

_LLAVA_NEXT = variant(
    _LLAVA,
    "llava_next",
    "LLaVA-NeXT",
    beside=projector("llava_next.LlavaNextMultiModalProjector"),
    processor=images(_next_settings),
)

_SIGLIP: dict[str, Any] = {"tower_type": "siglip_vision_model", "tower": siglip("vision_tower.")}

ROWS = (
    _LLAVA,
    replace(_LLAVA, title="LLaVA with SigLIP", **_SIGLIP),
    variant(
        _LLAVA,
        "vipllava",
        "ViP-LLaVA",
        beside=projector("vipllava.VipLlavaMultiModalProjector"),
        transformers="5.23.0",
    ),
    _LLAVA_NEXT,
    replace(_LLAVA_NEXT, title="LLaVA-NeXT with SigLIP, Granite Vision", **_SIGLIP),
    variant(
        _LLAVA,
        "llava_onevision",
        "LLaVA-OneVision",
        video_processor="LlavaOnevision",
        tower=siglip("vision_tower."),
        beside=projector("llava_onevision.LlavaOnevisionMultiModalProjector"),
        processor=_onevision_settings,
        videos=Accepts.PICTURES,
    ),
    TileFamily(
        "llava_next_video",
        "LLaVA-NeXT-Video",
        video_processor="LlavaNextVideo",
        tower=clip("vision_tower."),
        beside=projector(
            "llava_next_video.LlavaNextVideoMultiModalProjector",
            served=(one_of("spatial_pool_mode", "average", "max"),),
        ),
        encoder=LlavaNextVideo,
        processor=_video_settings,
        videos=Accepts.PICTURES,
    ),
)
