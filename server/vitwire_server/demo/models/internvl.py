"""Demo models with InternVL's tower (OpenGVLab)."""

from collections.abc import Mapping

from vitwire_server.demo.demo_model import IMAGENET, TEXT, VISION, DemoModel, demo_vlm
from vitwire_server.demo.saving import save_internvl

_QWEN2 = {"model_type": "qwen2", **TEXT}
_TOWER = {**VISION, "image_size": [112, 112], "patch_size": [14, 14], "attention_bias": True}
_SIZE = {"size": {"height": 112, "width": 112}, "resample": 3}
_IMAGE = {
    **IMAGENET,
    **_SIZE,
    "image_processor_type": "GotOcr2ImageProcessor",
    "crop_to_patches": True,
    "min_patches": 1,
    "max_patches": 6,
}

INTERNVL: Mapping[str, DemoModel] = {
    "internvl": demo_vlm(
        text=_QWEN2,
        vision={"model_type": "internvl_vision", **_TOWER},
        image=_IMAGE,
        video={**IMAGENET, **_SIZE, "video_processor_type": "InternVLVideoProcessor"},
        fields={"image_token_id": 500, "image_seq_length": 16},
    ),
    "internvl_chat": demo_vlm(
        text=_QWEN2,
        vision={
            "model_type": "internvl_vision",
            **_TOWER,
            "attention_bias": False,
            "norm_type": "rms_norm",
            "use_qk_norm": True,
        },
        image={**IMAGENET, "crop_size": 112, "size": 112, "feature_extractor_type": "CLIPFeatureExtractor"},
        base="internvl",
        save=save_internvl(),
    ),
    "qianfan_ocr": demo_vlm(
        text={"model_type": "qwen3", **TEXT, "head_dim": 16},
        vision=_TOWER,
        image=_IMAGE,
        fields={"image_token_id": 500, "image_seq_length": 16},
    ),
}
"""By `model_type`."""
