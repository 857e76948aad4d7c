"""Rows of towers that see an image in two resolutions."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vitwire_server.core.items import Modality
from vitwire_server.core.models import Preprocessing
from vitwire_server.core.tilings import Tiling, TilingRule
from vitwire_server.towers.family import Family, Module, in_model, stripped
from vitwire_server.towers.processors.settings import BILINEAR, CLIP, HALF, Processor, per_channel, square
from vitwire_server.towers.tile_encoders import siglip
from vitwire_server.towers.processors.tiles import shade, tiled
from vitwire_server.towers.two_view_encoders import DeepseekHybrid, DeepseekOcr2, Step3
from vitwire_server.towers.layouts.two_views import CropFamily, PairFamily

_OURS = "vitwire_server.towers.two_view_encoders"


# -- DeepSeek-VL with SAM ----------------------------------------------------------------------------


def _hybrid_settings(files: Processor, config: Any) -> dict[Modality, Preprocessing]:  # noqa: ANN401
    """The small view is made of the large one."""
    low, high = config.vision_config.image_size, config.high_res_vision_config.image_size
    image = files.image
    mean = per_channel(image, "high_res_image_mean", CLIP[0])
    std = per_channel(image, "high_res_image_std", CLIP[1])
    tiling = Tiling(
        TilingRule.SQUARE,
        (low, low),
        background=shade(per_channel(image, "image_mean", CLIP[0])),
        min_side=int(image.get("min_size", 14)),
        crop=(high, high),
        crop_background=shade(mean),
        crop_resample=int(image["high_res_resample"]) if "high_res_resample" in image else None,
    )
    return {Modality.IMAGE: replace(tiled(image, tiling, CLIP), crop_mean=mean, crop_std=std)}


_HYBRID = PairFamily(
    model_type="deepseek_vl_hybrid",
    title="DeepSeek-VL with SAM",
    architecture="24 x 1024, patch 16, and SAM 12 x 768",
    tower=siglip("vision_model."),
    beside={
        "sam": Module(
            source="sam.modeling_sam:SamVisionModel",
            prefixes=in_model("high_res_vision_model."),
            config="high_res_vision_config",
        ),
        "neck": Module(
            source="deepseek_vl_hybrid.modeling_deepseek_vl_hybrid:DeepseekVLSamVisionNeck",
            prefixes=in_model("high_res_vision_neck."),
            config="high_res_vision_config",
        ),
        "merger": Module(
            source=f"{_OURS}:Merger",
            prefixes=in_model("high_res_vision_proj."),
            config="",
        ),
        "alpha": Module(
            source=f"{_OURS}:Alpha",
            prefixes={"model.high_res_vision_alpha": "weight", "high_res_vision_alpha": "weight"},
            config="",
        ),
        "projector": Module(
            source="deepseek_vl_hybrid.modeling_deepseek_vl_hybrid:DeepseekVLHybridAligner",
            prefixes=in_model("aligner."),
            config="",
        ),
    },
    encoder=DeepseekHybrid,
    processor=_hybrid_settings,
    converts=False,
    videos=False,
    special="pixels are the small view, crops the large one; transformers' layout (deepseek-community)",
)


# -- Step3-VL ----------------------------------------------------------------------------------------


def _step3_settings(files: Processor, config: Any) -> dict[Modality, Preprocessing]:  # noqa: ANN401
    view, crop = config.vision_config.image_size, config.crop_size
    most = int(files.image.get("max_image_size", 3024))
    tiling = Tiling(
        TilingRule.WINDOWS,
        (view, view),
        max_tiles=max(1, -(-most // crop)) ** 2,
        max_side=most,
        crop=(crop, crop),
    )
    return {Modality.IMAGE: tiled(files.image, tiling, CLIP, BILINEAR)}


@dataclass(frozen=True, kw_only=True)
class Step3Family(CropFamily):
    """Checkpoints of the hub's own code and of transformers, whose configurations differ in their names."""

    def read_config(self, folder: Path, settings: Mapping[str, Any]) -> Any:  # noqa: ANN401
        """See Family."""
        # not in the oldest transformers that other rows are served with
        from transformers.models.step3p7.configuration_step3p7 import Step3p7Config  # noqa: PLC0415

        text = settings.get("text_config") or {}
        config = Step3p7Config(
            vision_config=dict(settings["vision_config"]),
            text_config={"hidden_size": text.get("hidden_size") or settings["hidden_size"]},
            projector_bias=settings.get("projector_bias", False),
            dtype=settings.get("dtype") or settings.get("torch_dtype"),
        )
        config.crop_size = square(Processor.read(folder).image, "patch_size", 504)
        return config


_STEP3P7 = Step3Family(
    model_type="step3p7",
    title="Step-3.7",
    architecture="47 x 1536, patch 14",
    tower=Module(source="step3p7.modeling_step3p7:Step3p7VisionModel", prefixes=in_model("vision_model.")),
    beside={
        "projector": Module(
            source=f"{_OURS}:Projection",
            prefixes=stripped("model.multi_modal_projector.", "vit_large_projector.", "model.vit_large_projector."),
            config="",
        )
    },
    encoder=Step3,
    processor=_step3_settings,
    videos=False,
    special="one view of each image as pixels, windows of large ones as crops; rows of the crops come first",
)
_STEP3 = [replace(_STEP3P7, model_type=name, title="Step3-VL") for name in ("step3_vl", "step_robotics")]


# -- DeepSeek-OCR-2 ----------------------------------------------------------------------------------


def _ocr_settings(files: Processor, config: Any) -> dict[Modality, Preprocessing]:  # noqa: ANN401
    view, crop = config.vision_config.sam_config.image_size, config.crop_size
    image = files.image
    if not image.get("crop_to_patches", True):
        raise ValueError("crop_to_patches false is not served")
    tiling = Tiling(
        TilingRule.CLOSEST_RATIO,
        (view, view),
        min_tiles=int(image.get("min_patches", 2)),
        max_tiles=int(image.get("max_patches", 6)),
        background=tuple(int(value) for value in image.get("background_color", (127, 127, 127))),
        crop=(crop, crop),
    )
    return {Modality.IMAGE: tiled(image, tiling, HALF)}


@dataclass(frozen=True, kw_only=True)
class OcrFamily(CropFamily):
    """DeepSeek-OCR-2, whose sizes are in its processor's files."""

    def read_config(self, folder: Path, settings: Mapping[str, Any]) -> Any:  # noqa: ANN401
        """See Family."""
        config = super().read_config(folder, settings)
        config.crop_size = square(Processor.read(folder).image, "tile_size", 768)
        return config


_DEEPSEEK_OCR2 = OcrFamily(
    model_type="deepseek_ocr2",
    title="DeepSeek-OCR-2",
    architecture="SAM 12 x 768, then 24 x 896",
    tower=Module(
        source="deepseek_ocr2.modeling_deepseek_ocr2:DeepseekOcr2VisionModel",
        prefixes={
            "model.vision_tower.": "",
            "vision_tower.": "",
            "model.sam_model.": "sam_encoder.",
            "model.qwen2_model.model.model.": "vision_encoder.",
            "model.qwen2_model.query_": "query_",
        },
        renames=(
            (r"^sam_encoder\.blocks\.", "sam_encoder.layers."),
            (r"^(sam_encoder\.layers\.\d+)\.norm([12])\.", r"\1.layer_norm\2."),
            (r"^sam_encoder\.patch_embed\.proj\.", "sam_encoder.patch_embed.projection."),
            (r"^sam_encoder\.neck\.0\.", "sam_encoder.neck.conv1."),
            (r"^sam_encoder\.neck\.1\.", "sam_encoder.neck.layer_norm1."),
            (r"^sam_encoder\.neck\.2\.", "sam_encoder.neck.conv2."),
            (r"^sam_encoder\.neck\.3\.", "sam_encoder.neck.layer_norm2."),
            (r"^sam_encoder\.net_2\.", "sam_encoder.proj.conv1."),
            (r"^sam_encoder\.net_3\.", "sam_encoder.proj.conv2."),
            (r"^query_(768|1024)\.", r"query_\1_resolution."),
        ),
        ignored=("vision_encoder.embed_tokens.",),
    ),
    beside={
        "projector": Module(
            source=f"{_OURS}:QueryProjection",
            prefixes=stripped("model.multi_modal_projector.", "model.projector.layers."),
            config="",
        ),
        "separator": Module(
            source=f"{_OURS}:Separator",
            prefixes={"model.view_separator": "weight", "model.view_seperator": "weight"},
            config="",
        ),
    },
    encoder=DeepseekOcr2,
    processor=_ocr_settings,
    videos=False,
    special="one view of each image as pixels, tiles of large ones as crops; crops, view, separator",
)

TWO_VIEW_ROWS: tuple[Family, ...] = (_HYBRID, _STEP3P7, *_STEP3, _DEEPSEEK_OCR2)
