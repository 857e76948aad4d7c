"""Demo models of vision transformers that are served alone."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from transformers import AutoModel, AutoModelForPreTraining, CLIPVisionModelWithProjection, PreTrainedModel

from vitwire_server.demo.demo_model import (
    CLIP,
    HALF,
    IMAGENET,
    STEPS,
    TEXT,
    VISION,
    DemoModel,
    Json,
    demo_vlm,
    save_plain,
    write_json,
)
from vitwire_server.demo.saving import save_intern_vit

_VIT = {**VISION, "image_size": 56, "patch_size": 14}
_RESAMPLED = {**VISION, "image_size": 70, "patch_size": 14}
"""Positions of 5 x 5 patches, for tiles of 4 x 4."""
_SQUARE = {"size": {"height": 56, "width": 56}}
_CROPPED = {
    "size": {"shortest_edge": 64},
    "crop_size": {"height": 56, "width": 56},
    "do_center_crop": True,
    "resample": 3,
}
_CLIP_IMAGE = {**CLIP, **_CROPPED, "image_processor_type": "CLIPImageProcessor"}
_BIT_IMAGE = {**IMAGENET, **_CROPPED, "image_processor_type": "BitImageProcessor"}
_SIGLIP_IMAGE = {**HALF, **_SQUARE, "image_processor_type": "SiglipImageProcessor", "resample": 3}
_DINOV3_IMAGE = {**IMAGENET, **_SQUARE, "image_processor_type": "DINOv3ViTImageProcessorFast", "resample": 2}
_VIT_IMAGE = {**HALF, **_SQUARE, "image_processor_type": "ViTImageProcessor", "resample": 2}
_DEIT_IMAGE = {
    **IMAGENET,
    **_CROPPED,
    "image_processor_type": "DeiTImageProcessor",
    "size": {"height": 64, "width": 64},
}
_DECODER = {
    "decoder_hidden_size": 32,
    "decoder_intermediate_size": 48,
    "decoder_num_attention_heads": 2,
    "decoder_num_hidden_layers": 2,
}
_TEXT = {**TEXT, "projection_dim": 48, "projection_size": 64}


class _Projected:
    """CLIP's tower with the projection, which transformers has no automatic class for."""

    from_config = CLIPVisionModelWithProjection._from_config  # noqa: SLF001 - what automatic classes call


def _alone(vision: Json, image: Json, **others: Any) -> DemoModel:  # noqa: ANN401 - those of DemoModel
    """A tower whose checkpoint holds nothing else."""
    files = {"preprocessor_config.json": {**STEPS, **image}}
    return DemoModel(config=vision, files=lambda _: files, **{"auto": AutoModel, **others})


def _with_text(vision: Json, image: Json, fields: Mapping[str, Any]) -> DemoModel:
    return demo_vlm(text=_TEXT, vision=vision, image=image, fields=fields, auto=AutoModel)


def _save_as(model_type: str) -> Callable[[PreTrainedModel, Path], None]:
    """Under another `model_type`."""

    def save(model: PreTrainedModel, out: Path) -> None:
        save_plain(model, out)
        settings = json.loads((out / "config.json").read_text(encoding="utf-8"))
        write_json(out / "config.json", {**settings, "model_type": model_type})

    return save


PLAIN: Mapping[str, DemoModel] = MappingProxyType(
    {
        "clip": _with_text(_VIT, _CLIP_IMAGE, {"projection_dim": 48}),
        "clip_vision_model": _alone({**_VIT, "projection_dim": 48}, _CLIP_IMAGE, auto=_Projected),
        "metaclip_2": _with_text(_VIT, _CLIP_IMAGE, {"projection_dim": 48}),
        "chinese_clip": _with_text(
            _VIT, {**_CLIP_IMAGE, "image_processor_type": "ChineseCLIPImageProcessor"}, {"projection_dim": 48}
        ),
        "altclip": _with_text(_VIT, _CLIP_IMAGE, {"projection_dim": 48}),
        "mlcd_vision_model": _alone(_VIT, _CLIP_IMAGE),
        "siglip": _with_text(_VIT, _SIGLIP_IMAGE, {}),
        "siglip_vision_model": _alone(_VIT, _SIGLIP_IMAGE),
        "dinov2": _alone({**_RESAMPLED, "use_swiglu_ffn": True}, _BIT_IMAGE),
        "dinov2_with_registers": _alone({**_RESAMPLED, "num_register_tokens": 3}, _BIT_IMAGE),
        "dinov3_vit": _alone({**_RESAMPLED, "num_register_tokens": 4, "use_gated_mlp": True}, _DINOV3_IMAGE),
        "vit": _alone(_VIT, _VIT_IMAGE),
        "deit": _alone(_VIT, _DEIT_IMAGE),
        "vit_msn": _alone(_VIT, {**_VIT_IMAGE, **IMAGENET}),
        "ijepa": _alone(_VIT, _VIT_IMAGE),
        "vit_mae": _alone({**_VIT, **_DECODER}, {**_VIT_IMAGE, **IMAGENET}, auto=AutoModelForPreTraining),
        "aimv2_vision_model": _alone(_VIT, _CLIP_IMAGE),
        "aimv2": _with_text(_VIT, _CLIP_IMAGE, {"projection_dim": 48}),
        "intern_vit_6b": _alone(
            {**VISION, "image_size": [56, 56], "patch_size": [14, 14], "attention_bias": True, "use_qk_norm": True},
            {**IMAGENET, "crop_size": 56, "size": 56, "feature_extractor_type": "CLIPFeatureExtractor"},
            base="internvl_vision",
            save=save_intern_vit,
        ),
        "radio": _alone(
            {
                "hidden_size": 64,
                "max_img_size": 112,
                "mlp_ratio": 1.5,
                "num_attention_heads": 4,
                "num_hidden_layers": 3,
                "patch_size": 14,
                "summary_idxs": [0, 2],
            },
            {**_CLIP_IMAGE, "crop_size": {"height": 56, "width": 42}, "do_normalize": False},
        ),
        "tipsv2": _with_text(
            {**_RESAMPLED, "mlp_ratio": 1.5, "num_register_tokens": 2, "use_swiglu_ffn": True},
            {**_SQUARE, "do_normalize": False, "image_processor_type": "Tipsv2ImageProcessor", "resample": 2},
            {},
        ),
        "mlcd": _alone(_VIT, _CLIP_IMAGE, base="mlcd_vision_model", save=_save_as("mlcd")),
    }
)
