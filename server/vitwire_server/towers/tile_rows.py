"""Rows of towers that take tiles of a fixed size."""

from math import isqrt
from typing import Any

from vitwire_server.core.items import Modality
from vitwire_server.core.models import Preprocessing
from vitwire_server.core.tilings import Overview, Tiling, TilingRule
from vitwire_server.towers.family import Family, Module, in_model
from vitwire_server.towers.models.internvl import INTERNVL, INTERNVL_CHAT
from vitwire_server.towers.processors.settings import BILINEAR, CLIP, HALF, Processor, per_channel
from vitwire_server.towers.served import Served
from vitwire_server.towers.tile_encoders import (
    SHUFFLED,
    Gemma3,
    Llama4,
    LlavaOnevision,
    Siglip,
    shuffles,
    siglip,
)
from vitwire_server.towers.processors.tiles import shade, stretched, tiled
from vitwire_server.towers.layouts.tiles import TileFamily
from vitwire_server.towers.two_view_rows import TWO_VIEW_ROWS

_PROJECTOR = in_model("multi_modal_projector.")


# -- SigLIP and a projector --------------------------------------------------------------------------


def _onevision_settings(files: Processor, config: Any) -> dict[Modality, Preprocessing]:  # noqa: ANN401
    size = config.vision_config.image_size
    pinpoints = files.image.get("image_grid_pinpoints") or config.image_grid_pinpoints
    if any(length % size for pair in pinpoints for length in pair):
        raise ValueError(f"image_grid_pinpoints must be multiples of {size}")
    layouts = tuple((int(height) // size, int(width) // size) for height, width in pinpoints)
    tiling = Tiling(
        TilingRule.BEST_FIT,
        (size, size),
        overview=Overview.FIRST,
        max_tiles=max(rows * columns for rows, columns in layouts),
        layouts=layouts,
    )
    frames = tiled(files.video, tiling, CLIP)
    return {Modality.IMAGE: tiled(files.image, tiling, CLIP), Modality.VIDEO: stretched(frames, tiling.tile)}


def _gemma3_settings(files: Processor, config: Any) -> dict[Modality, Preprocessing]:  # noqa: ANN401
    tile = (config.vision_config.image_size,) * 2
    return {Modality.IMAGE: tiled(files.image, Tiling(TilingRule.STRETCH, tile), HALF, BILINEAR)}


def _pools(tokens: int, config: Any) -> bool:  # noqa: ANN401
    """Whether pooling squares of patches leaves so many tokens."""
    patches, side = config.vision_config.image_size // config.vision_config.patch_size, isqrt(tokens)
    return side**2 == tokens and patches // (patches // side) == side


def _deepseek_settings(files: Processor, config: Any) -> dict[Modality, Preprocessing]:  # noqa: ANN401
    size = config.vision_config.image_size
    tiling = Tiling(
        TilingRule.SQUARE,
        (size, size),
        background=shade(per_channel(files.image, "image_mean", CLIP[0])),
        min_side=int(files.image.get("min_size", 14)),
    )
    return {Modality.IMAGE: tiled(files.image, tiling, CLIP)}


_LLAVA_ONEVISION = TileFamily(
    model_type="llava_onevision",
    title="LLaVA-OneVision",
    architecture="26 x 1152, patch 14",
    tower=siglip("vision_tower."),
    beside={
        "projector": Module(
            source="llava_onevision.modeling_llava_onevision:LlavaOnevisionMultiModalProjector",
            prefixes=_PROJECTOR,
            config="",
        )
    },
    encoder=LlavaOnevision,
    processor=_onevision_settings,
    special="rows of every tile, whole image first; unpadding, line breaks and pooling of frames stay with the LLM",
)
_GEMMA3 = TileFamily(
    model_type="gemma3",
    title="Gemma 3",
    architecture="27 x 1152, patch 14",
    tower=siglip("vision_tower."),
    beside={
        "projector": Module(
            source="gemma3.modeling_gemma3:Gemma3MultiModalProjector",
            prefixes=_PROJECTOR,
            config="",
            served=(Served("mm_tokens_per_image", _pools, "a square whose root divides image_size / patch_size"),),
        )
    },
    encoder=Gemma3,
    processor=_gemma3_settings,
    videos=False,
    special="pan and scan, where wanted, sends its pictures as images of their own",
)
_DEEPSEEK_VL = TileFamily(
    model_type="deepseek_vl",
    title="DeepSeek-VL",
    architecture="24 x 1024, patch 16",
    tower=siglip("vision_model."),
    beside={
        "projector": Module(
            source="deepseek_vl.modeling_deepseek_vl:DeepseekVLAligner",
            prefixes=in_model("aligner."),
            config="",
        )
    },
    encoder=Siglip,
    processor=_deepseek_settings,
    converts=False,
    videos=False,
    special="transformers' layout (deepseek-community)",
)


# -- Llama 4 -----------------------------------------------------------------------------------------


def _llama4_settings(files: Processor, config: Any) -> dict[Modality, Preprocessing]:  # noqa: ANN401
    size = config.vision_config.image_size
    if files.image.get("resize_to_max_canvas"):
        raise ValueError("resize_to_max_canvas is not served")
    tiling = Tiling(
        TilingRule.CANVAS, (size, size), overview=Overview.LAST, max_tiles=int(files.image.get("max_patches", 16))
    )
    return {Modality.IMAGE: tiled(files.image, tiling, HALF, BILINEAR)}


_LLAMA4 = TileFamily(
    model_type="llama4",
    title="Llama 4",
    architecture="34 x 1408, patch 14",
    tower=Module(
        source="llama4.modeling_llama4:Llama4VisionModel",
        prefixes=in_model("vision_model."),
        served=(Served("pixel_shuffle_ratio", shuffles, SHUFFLED),),
    ),
    beside={
        "projector": Module(source="llama4.modeling_llama4:Llama4MultiModalProjector", prefixes=_PROJECTOR, config="")
    },
    encoder=Llama4,
    processor=_llama4_settings,
    videos=False,
)

TILE_ROWS: tuple[Family, ...] = (
    INTERNVL,
    INTERNVL_CHAT,
    _LLAVA_ONEVISION,
    _GEMMA3,
    _DEEPSEEK_VL,
    _LLAMA4,
    *TWO_VIEW_ROWS,
)
