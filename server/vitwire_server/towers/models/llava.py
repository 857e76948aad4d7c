"""LLaVA 1.5, NeXT, NeXT-Video and OneVision, ViP-LLaVA: CLIP's tower or SigLIP's; OneVision 2: one like Qwen2-VL's."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import cached_property
from math import isqrt
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.llava_next_video.modeling_llava_next_video import LlavaNextVideoPooler
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

from vitwire_server.core.footprints import PooledFrameFootprints
from vitwire_server.core.geometries import PooledFrameGeometry
from vitwire_server.core.grids import Grid
from vitwire_server.core.items import Modality
from vitwire_server.core.models import Preprocessing, Resizing
from vitwire_server.core.tilings import Overview, Tiling, TilingRule
from vitwire_server.towers.configs import Config, dtype_of, new_config, one_of, require
from vitwire_server.towers.family import Accepts, Parts, in_model
from vitwire_server.towers.layouts.assembled import AssembledEncoder, UnitInput
from vitwire_server.towers.layouts.packed import PackedFamily
from vitwire_server.towers.layouts.tiles import TileFamily, Unit
from vitwire_server.towers.processors.settings import CLIP, HALF, ProcessorFiles, images, square
from vitwire_server.towers.processors.tiles import fits_tower, stretched, tile_of, tiled
from vitwire_server.towers.shared.fused import halved
from vitwire_server.towers.shared.parts import projector, stock, variant
from vitwire_server.towers.shared.projected_tiles import ProjectedLayers, clip
from vitwire_server.towers.shared.siglip import siglip

_ONEVISION = {"hidden_act": "gelu", "layer_norm_eps": 1e-6, "layer_norm_type": "layer_norm", "temporal_patch_size": 1}
"""Fields of LLaVA-OneVision 2's tower that have one value."""


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


class OneVisionRotary(nn.Module):
    """A quarter of a head's frequencies is for time, which is 0 in images; three eighths each for row and column."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self._side, self._theta = config.embed_dim // config.num_heads, config.rope_parameters["rope_theta"]

    def forward(self, _: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines `(patches, side)`. The authors repeat all angles, but rotate neighbouring columns."""
        exponents = torch.arange(self._side * 3 // 16, device=places.device) / (self._side * 3 // 16)
        angles = (places[..., None] * self._theta**-exponents).flatten(1)
        angles = functional.pad(angles, (self._side // 8, 0)).repeat(1, 2)
        halves = torch.cat([angles[:, ::2], angles[:, 1::2]], dim=1)
        return halves.cos(), halves.sin()


class OneVision2(Qwen2VisionTransformerPretrainedModel):
    """Qwen2-VL's tower for single frames, with a norm before its layers, and other rotary positions."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)  # type: ignore[arg-type]
        width, side = config.embed_dim, config.patch_size
        kernel = nn.Conv2d(3, width, side, side, bias=False)
        norm = nn.LayerNorm(width, eps=1e-6)
        self.patch_embed: Any = nn.Sequential(nn.Unflatten(1, (3, side, side)), kernel, nn.Flatten(), norm)
        self.rotary_pos_emb: Any = OneVisionRotary(config)


def _onevision2_config(_: Path, settings: Mapping[str, Any]) -> Config:
    """LLaVA-OneVision 2's, which transformers has no classes for."""
    own, width = settings["vision_config"], settings["vision_config"]["hidden_size"]
    for name, value in _ONEVISION.items():
        require(f"vision_config.{name}", own.get(name, value), value)
    if width % (32 * own["num_attention_heads"]):
        raise ValueError(f"vision_config.hidden_size is {width}, but must be heads of a multiple of 32 columns")
    text, ratio = settings["text_config"]["hidden_size"], own["intermediate_size"] // width
    vision = {**_ONEVISION, **own, "embed_dim": width, "hidden_size": text, "mlp_ratio": ratio}
    vision["depth"] = own["num_hidden_layers"]
    return new_config("qwen2_vl", vision_config=vision, dtype=dtype_of(settings))


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
    PackedFamily(
        "llava_onevision2",
        "LLaVA-OneVision 2",
        configuration=_onevision2_config,
        tower=stock(
            OneVision2,
            in_model("visual."),
            renames=(
                (r"^embeddings\.patch_embedding\.", "patch_embed.1."),
                (r"^layernorm_pre\.", "patch_embed.3."),
                (r"^encoder\.layers\.(\d+)\.(layer_)?", r"blocks.\1."),
                (r"\.self_attn\.", ".attn."),
            ),
            convert=halved(".qkv."),
        ),
        width="vision_config.hidden_size",
        videos=Accepts.NOTHING,
    ),
)
