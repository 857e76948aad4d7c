"""Demo models of DeepSeek, and those with its towers."""

from collections.abc import Mapping

from vitwire_server.demo.demo_model import CLIP, HALF, IMAGENET, TEXT, VISION, DemoModel, demo_vlm

_LLAMA = {"model_type": "llama", **TEXT}
_SIGLIP = {"model_type": "siglip_vision_model", **VISION, "image_size": 56, "patch_size": 14, "vision_use_head": False}
_EXPERTS = {
    **TEXT,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "moe_intermediate_size": 64,
    "n_routed_experts": 2,
    "n_shared_experts": 1,
    "num_experts_per_tok": 1,
}
"""A text model with experts, behind the towers of DeepSeek-OCR-2 and Unlimited-OCR."""
_SAM = {
    "global_attn_indexes": [1],
    "hidden_size": 32,
    "mlp_dim": 48,
    "num_attention_heads": 2,
    "num_hidden_layers": 3,
    "output_channels": 16,
}
_SAM_OCR = {
    "downsample_channels": [24, 32],
    "global_attn_indexes": [],
    "image_size": 128,
    "patch_size": 2,
}
"""As many patches as published, which the numbers of queries ask for, but small, and none that sees all others."""
_OCR_IMAGE = {
    **HALF,
    "background_color": [127, 127, 127],
    "crop_to_patches": True,
    "max_patches": 6,
    "min_patches": 2,
    "resample": 3,
    "size": {"height": 128, "width": 128},
    "tile_size": 96,
}

DEEPSEEK: Mapping[str, DemoModel] = {
    "deepseek_vl": demo_vlm(
        text=_LLAMA,
        vision=_SIGLIP,
        image={
            **CLIP,
            "image_processor_type": "DeepseekVLImageProcessor",
            "min_size": 14,
            "resample": 3,
            "size": {"height": 56, "width": 56},
        },
    ),
    "deepseek_vl_hybrid": demo_vlm(
        text=_LLAMA,
        vision=_SIGLIP,
        image={
            **CLIP,
            "image_processor_type": "DeepseekVLHybridImageProcessor",
            "min_size": 14,
            "resample": 3,
            "size": {"height": 56, "width": 56},
            "high_res_image_mean": IMAGENET["image_mean"],
            "high_res_image_std": IMAGENET["image_std"],
            "high_res_resample": 3,
            "high_res_size": {"height": 128, "width": 128},
        },
        fields={
            "image_token_id": 500,
            "high_res_vision_config": {
                "model_type": "sam_vision_model",
                **_SAM,
                "image_size": 128,
                "num_pos_feats": 32,
                "window_size": 3,
            },
        },
    ),
    "deepseek_ocr2": demo_vlm(
        text=_EXPERTS,
        vision={
            "sam_config": {**_SAM, **_SAM_OCR},
            "encoder_config": {
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_attention_heads": 4,
                "num_hidden_layers": 2,
                "num_key_value_heads": 2,
            },
        },
        image={**_OCR_IMAGE, "image_processor_type": "DeepseekOcr2ImageProcessor"},
    ),
    "unlimited_ocr": demo_vlm(
        text=_EXPERTS,
        vision={
            "sam_config": {**_SAM, "downsample_channels": [24, 32], "image_size": 128, "patch_size": 4},
            "encoder_config": {**VISION, "hidden_size": 32, "image_size": 32, "patch_size": 4},
        },
        image={**_OCR_IMAGE, "image_processor_type": "UnlimitedOcrImageProcessor"},
    ),
}
"""By `model_type`."""
