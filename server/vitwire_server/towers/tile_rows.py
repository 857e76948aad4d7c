"""Rows of towers that take tiles of a fixed size."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.models.internvl.configuration_internvl import InternVLConfig

from vitwire_server.core.items import Modality
from vitwire_server.core.models import Preprocessing
from vitwire_server.core.tilings import Overview, Tiling, TilingRule
from vitwire_server.towers.family import Family, Module, Weights, stripped
from vitwire_server.towers.tile_encoders import Gemma3, InternVL, Llama4, LlavaOnevision, Siglip, thirds
from vitwire_server.towers.tile_settings import (
    BICUBIC,
    BILINEAR,
    CLIP,
    HALF,
    IMAGENET,
    Processor,
    channels,
    stretched,
    tiled,
)
from vitwire_server.towers.tiles import TileFamily, side
from vitwire_server.towers.two_view_rows import TWO_VIEW_ROWS

_TOWER = ("model.vision_tower.", "vision_tower.")
_PROJECTOR = stripped("model.multi_modal_projector.", "multi_modal_projector.")


def _siglip(*prefixes: str) -> Module:
    names = stripped(*(f"{prefix}{inner}" for prefix in prefixes for inner in ("vision_model.", "")))
    return Module(source="siglip.modeling_siglip:SiglipVisionModel", prefixes=names, ignored=("head.",))


# -- InternVL ----------------------------------------------------------------------------------------


def _internvl_settings(files: Processor, config: Any) -> dict[Modality, Preprocessing]:  # noqa: ANN401
    image = files.image
    tile = (side(config.vision_config.image_size),) * 2
    tiling = Tiling(
        TilingRule.CLOSEST_RATIO,
        tile,
        overview=Overview.LAST,
        min_tiles=int(image.get("min_patches", 1)),
        max_tiles=int(image.get("max_patches", 12)),
    )
    frames = tiled(files.video, tiling, IMAGENET)
    return {Modality.IMAGE: tiled(image, tiling, IMAGENET), Modality.VIDEO: stretched(frames, tile)}


def _original_settings(files: Processor, config: Any) -> dict[Modality, Preprocessing]:  # noqa: ANN401
    """The original's processor is code beside the weights; its numbers are in config.json."""
    tile = (side(config.vision_config.image_size),) * 2
    cut = config.dynamic_image_size
    tiling = Tiling(
        TilingRule.CLOSEST_RATIO if cut else TilingRule.STRETCH,
        tile,
        overview=Overview.LAST if cut and config.use_thumbnail else Overview.NONE,
        min_tiles=config.min_dynamic_patch if cut else 1,
        max_tiles=config.max_dynamic_patch if cut else 1,
    )
    settings = tiled({**files.image, "resample": BICUBIC}, tiling, IMAGENET)
    return {Modality.IMAGE: settings, Modality.VIDEO: stretched(settings, tile)}


def _unfused(weights: Weights, config: Any) -> Weights:  # noqa: ANN401
    """Query, key and value apart, as transformers holds them."""
    del config
    apart: Weights = {}
    for name, tensor in weights.items():
        if ".attn.qkv." in name:
            for part, own in zip(("q_proj", "k_proj", "v_proj"), thirds(tensor), strict=True):
                apart[name.replace("attn.qkv", f"attention.{part}")] = own
        else:
            apart[name] = tensor
    return apart


@dataclass(frozen=True, kw_only=True)
class OriginalInternVL(TileFamily):
    """Checkpoints whose config.json names the language model `llm_config` and the tower's fields in OpenGVLab's way."""

    def read_config(self, folder: Path, settings: Mapping[str, Any]) -> Any:  # noqa: ANN401
        """See Family. Raises ValueError over a generation that computes rows in another way."""
        del folder
        vision = dict(settings["vision_config"])
        if settings.get("ps_version", "v2") != "v2":
            raise ValueError(f"ps_version {settings['ps_version']!r} is not served, only 'v2' is")
        if settings.get("force_image_size", vision["image_size"]) != vision["image_size"]:
            raise ValueError(
                f"force_image_size {settings['force_image_size']} differs from image_size {vision['image_size']}"
            )
        config = InternVLConfig(
            vision_config={
                **{name: vision[name] for name in _SAME if name in vision},
                "attention_bias": vision.get("qkv_bias", True),
                "use_qk_norm": vision.get("qk_normalization", False),
            },
            text_config={"model_type": "qwen2", "hidden_size": settings["llm_config"]["hidden_size"]},
            downsample_ratio=settings.get("downsample_ratio", 0.5),
            vision_feature_layer=settings.get("select_layer", -1),
            dtype=settings.get("torch_dtype") or settings.get("dtype"),
        )
        for name, default in _DYNAMIC.items():
            setattr(config, name, settings.get(name, default))
        return config


_SAME = (
    "hidden_size",
    "hidden_act",
    "image_size",
    "intermediate_size",
    "layer_norm_eps",
    "norm_type",
    "num_attention_heads",
    "num_hidden_layers",
    "patch_size",
)
_DYNAMIC = {"dynamic_image_size": True, "use_thumbnail": True, "min_dynamic_patch": 1, "max_dynamic_patch": 12}

_INTERNVL = TileFamily(
    model_type="internvl",
    title="InternVL",
    architecture="24 x 1024 or 45 x 3200, patch 14",
    tower=Module(source="internvl.modeling_internvl:InternVLVisionModel", prefixes=stripped(*_TOWER)),
    beside={
        "projector": Module(
            source="internvl.modeling_internvl:InternVLMultiModalProjector", prefixes=_PROJECTOR, config=""
        )
    },
    encoder=InternVL,
    processor=_internvl_settings,
    special="transformers' own layout (`-hf`)",
)
_INTERNVL_CHAT = OriginalInternVL(
    model_type="internvl_chat",
    title="InternVL 2, 2.5, 3 and 3.5",
    architecture="24 x 1024 or 45 x 3200, patch 14",
    tower=Module(
        source="internvl.modeling_internvl:InternVLVisionModel",
        prefixes=stripped("vision_model."),
        renames=(
            (r"^encoder\.layers\.", "encoder.layer."),
            (r"\.ls([12])$", r".lambda_\1"),
            (r"\.attn\.proj\.", ".attention.projection_layer."),
            (r"\.attn\.([qk]_norm)\.", r".attention.\1."),
            (r"\.norm1\.", ".layernorm_before."),
            (r"\.norm2\.", ".layernorm_after."),
            (r"^embeddings\.class_embedding$", "embeddings.cls_token"),
            (r"^embeddings\.position_embedding$", "embeddings.position_embeddings"),
            (r"^embeddings\.patch_embedding\.", "embeddings.patch_embeddings.projection."),
        ),
        convert=_unfused,
    ),
    beside={
        "projector": Module(
            source="internvl.modeling_internvl:InternVLMultiModalProjector",
            prefixes={"mlp1.0.": "layer_norm.", "mlp1.1.": "linear_1.", "mlp1.3.": "linear_2."},
            config="",
        )
    },
    encoder=InternVL,
    processor=_original_settings,
    special="OpenGVLab's layout",
)


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


def _deepseek_settings(files: Processor, config: Any) -> dict[Modality, Preprocessing]:  # noqa: ANN401
    size = config.vision_config.image_size
    mean = channels(files.image, "image_mean", CLIP[0])
    tiling = Tiling(
        TilingRule.SQUARE,
        (size, size),
        background=tuple(int(value * 255) for value in mean),
        min_side=int(files.image.get("min_size", 14)),
    )
    return {Modality.IMAGE: tiled(files.image, tiling, CLIP)}


_LLAVA_ONEVISION = TileFamily(
    model_type="llava_onevision",
    title="LLaVA-OneVision",
    architecture="26 x 1152, patch 14",
    tower=_siglip(*_TOWER),
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
    tower=_siglip(*_TOWER),
    beside={
        "projector": Module(source="gemma3.modeling_gemma3:Gemma3MultiModalProjector", prefixes=_PROJECTOR, config="")
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
    tower=_siglip("model.vision_model.", "vision_model."),
    beside={
        "projector": Module(
            source="deepseek_vl.modeling_deepseek_vl:DeepseekVLAligner",
            prefixes=stripped("model.aligner.", "aligner."),
            config="",
        )
    },
    encoder=Siglip,
    processor=_deepseek_settings,
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
        source="llama4.modeling_llama4:Llama4VisionModel", prefixes=stripped("vision_model.", "model.vision_model.")
    ),
    beside={
        "projector": Module(source="llama4.modeling_llama4:Llama4MultiModalProjector", prefixes=_PROJECTOR, config="")
    },
    encoder=Llama4,
    processor=_llama4_settings,
    videos=False,
)

TILE_ROWS: tuple[Family, ...] = (
    _INTERNVL,
    _INTERNVL_CHAT,
    _LLAVA_ONEVISION,
    _GEMMA3,
    _DEEPSEEK_VL,
    _LLAMA4,
    *TWO_VIEW_ROWS,
)
