"""Demo models of tiles, with crops and without."""

from collections.abc import Mapping
from dataclasses import replace

from vitwire_server.demo.demo_model import CLIP, HALF, IMAGENET, STEPS, TEXT, VISION, DemoModel, demo_vlm
from vitwire_server.demo.saving import save_internvl, save_ovis, save_step3

_QWEN2 = {"model_type": "qwen2", **TEXT}
_SIGLIP = {"model_type": "siglip_vision_model", **VISION, "patch_size": 14, "vision_use_head": False}

DEEPSEEK_TEXT = {
    **TEXT,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "moe_intermediate_size": 64,
    "n_routed_experts": 2,
    "n_shared_experts": 1,
    "num_experts_per_tok": 1,
}
"""A text model with experts, behind the towers of DeepSeek-OCR-2 and Unlimited-OCR."""
_SAM_OCR = {
    "downsample_channels": [24, 32],
    "global_attn_indexes": [],
    "image_size": 128,
    "patch_size": 2,
}
"""As many patches as published, which the numbers of queries ask for, but small, and none that sees all others."""
SAM = {
    "global_attn_indexes": [1],
    "hidden_size": 32,
    "mlp_dim": 48,
    "num_attention_heads": 2,
    "num_hidden_layers": 3,
    "output_channels": 16,
}


INTERNVL_VISION = {**VISION, "image_size": [112, 112], "patch_size": [14, 14], "attention_bias": True}
INTERNVL_SIZE = {"size": {"height": 112, "width": 112}, "resample": 3}

_STEP3 = demo_vlm(
    text={
        **TEXT,
        "layer_types": ["full_attention"] * 3,
        "mlp_layer_types": ["dense"] * 3,
        "sliding_window": 64,
    },
    vision={**VISION, "image_size": 168, "patch_size": 14, "mlp_ratio": 1.5},
    image={
        **CLIP,
        "image_processor_type": "Step3p7ImageProcessor",
        "max_image_size": 448,
        "patch_size": 112,
        "resample": 2,
        "size": {"height": 168, "width": 168},
    },
)
_OVIS_SIZE = {"crop_size": {"height": 112, "width": 112}, "do_center_crop": True, "size": {"shortest_edge": 112}}
_OVIS2 = demo_vlm(
    text=_QWEN2,
    vision={**VISION, "hidden_stride": 2, "image_size": 112, "patch_size": 14, "vocab_size": 69},
    image={
        **CLIP,
        "image_processor_type": "Ovis2ImageProcessor",
        "crop_to_patches": True,
        "max_patches": 6,
        "resample": 3,
        "size": {"height": 112, "width": 112},
    },
    fields={
        "hidden_size": 64,
        "image_token_id": 500,
        "visual_indicator_token_ids": [502, 503, 504, 505, 506],
        "vocab_size": 512,
    },
)
TILES: Mapping[str, DemoModel] = {
    "internvl": demo_vlm(
        text=_QWEN2,
        vision={"model_type": "internvl_vision", **INTERNVL_VISION},
        image={
            **IMAGENET,
            **INTERNVL_SIZE,
            "image_processor_type": "GotOcr2ImageProcessor",
            "crop_to_patches": True,
            "min_patches": 1,
            "max_patches": 6,
        },
        video={**IMAGENET, **INTERNVL_SIZE, "video_processor_type": "InternVLVideoProcessor"},
        fields={"image_token_id": 500, "image_seq_length": 16},
    ),
    "internvl_chat": demo_vlm(
        text=_QWEN2,
        vision={
            "model_type": "internvl_vision",
            **INTERNVL_VISION,
            "attention_bias": False,
            "norm_type": "rms_norm",
            "use_qk_norm": True,
        },
        image={**IMAGENET, "crop_size": 112, "size": 112, "feature_extractor_type": "CLIPFeatureExtractor"},
        base="internvl",
        save=save_internvl(),
    ),
    "llava_onevision": demo_vlm(
        text=_QWEN2,
        vision={**_SIGLIP, "image_size": 56},
        image={
            **CLIP,
            "image_processor_type": "LlavaOnevisionImageProcessor",
            "image_grid_pinpoints": [[56 * h, 56 * w] for h in (1, 2, 3) for w in (1, 2, 3)],
            "resample": 3,
            "size": {"height": 56, "width": 56},
        },
        video={
            **CLIP,
            "resample": 3,
            "size": {"height": 56, "width": 56},
            "video_processor_type": "LlavaOnevisionVideoProcessor",
        },
        fields={
            "image_token_index": 500,
            "video_token_index": 501,
            "image_grid_pinpoints": [[56 * h, 56 * w] for h in (1, 2, 3) for w in (1, 2, 3)],
            "vision_aspect_ratio": "anyres_max_9",
        },
    ),
    "gemma3": demo_vlm(
        text={"model_type": "gemma3_text", **TEXT, "head_dim": 16},
        vision={**_SIGLIP, "image_size": 112},
        image={
            **HALF,
            "image_processor_type": "Gemma3ImageProcessor",
            "resample": 2,
            "size": {"height": 112, "width": 112},
        },
        fields={"image_token_index": 500, "mm_tokens_per_image": 16},
    ),
    "deepseek_vl": demo_vlm(
        text={"model_type": "llama", **TEXT},
        vision={**_SIGLIP, "image_size": 56},
        image={
            **CLIP,
            "image_processor_type": "DeepseekVLImageProcessor",
            "min_size": 14,
            "resample": 3,
            "size": {"height": 56, "width": 56},
        },
    ),
    "llama4": demo_vlm(
        text={
            "model_type": "llama4_text",
            **TEXT,
            "head_dim": 16,
            "intermediate_size_mlp": 128,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
        },
        vision={
            "model_type": "llama4_vision_model",
            **VISION,
            "intermediate_size": 256,
            "image_size": 112,
            "patch_size": 14,
            "projector_input_dim": 64,
            "projector_output_dim": 64,
            "vision_output_dim": 64,
        },
        image={
            **HALF,
            "image_processor_type": "Llama4ImageProcessor",
            "max_patches": 6,
            "resample": 2,
            "size": {"height": 112, "width": 112},
        },
        fields={"image_token_index": 500, "boi_token_index": 498, "eoi_token_index": 499},
    ),
    "deepseek_vl_hybrid": demo_vlm(
        text={"model_type": "llama", **TEXT},
        vision={**_SIGLIP, "image_size": 56},
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
                **SAM,
                "image_size": 128,
                "num_pos_feats": 32,
                "window_size": 3,
            },
        },
    ),
    "ovis2": _OVIS2,
    "ovis": replace(
        _OVIS2,
        files=lambda _: {"preprocessor_config.json": {**CLIP, **STEPS, **_OVIS_SIZE, "resample": 3}},
        base="ovis2",
        save=save_ovis,
    ),
    "florence2": demo_vlm(
        text={
            "model_type": "bart",
            "bos_token_id": 1,
            "d_model": 64,
            "decoder_attention_heads": 4,
            "decoder_ffn_dim": 96,
            "decoder_layers": 2,
            "decoder_start_token_id": 2,
            "encoder_attention_heads": 4,
            "encoder_ffn_dim": 96,
            "encoder_layers": 2,
            "eos_token_id": 2,
            "pad_token_id": 0,
            "vocab_size": 512,
        },
        vision={
            "depths": [1, 1, 2, 1],
            "embed_dim": [16, 32, 32, 64],
            "max_position_embeddings": 8,
            "num_groups": [2, 4, 4, 8],
            "num_heads": [2, 4, 4, 8],
            "projection_dim": 64,
            "window_size": 5,
        },
        image={
            **IMAGENET,
            "do_center_crop": False,
            "image_processor_type": "CLIPImageProcessor",
            "resample": 3,
            "size": {"height": 96, "width": 96},
        },
    ),
    "step3p7": _STEP3,
    "step3_vl": replace(_STEP3, base="step3p7", save=save_step3("step3_vl")),
    "step_robotics": replace(_STEP3, base="step3p7", save=save_step3("step_robotics")),
    "deepseek_ocr2": demo_vlm(
        text=DEEPSEEK_TEXT,
        vision={
            "sam_config": {**SAM, **_SAM_OCR},
            "encoder_config": {
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_attention_heads": 4,
                "num_hidden_layers": 2,
                "num_key_value_heads": 2,
            },
        },
        image={
            **HALF,
            "background_color": [127, 127, 127],
            "crop_to_patches": True,
            "image_processor_type": "DeepseekOcr2ImageProcessor",
            "max_patches": 6,
            "min_patches": 2,
            "resample": 3,
            "size": {"height": 128, "width": 128},
            "tile_size": 96,
        },
    ),
}
