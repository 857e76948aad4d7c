"""Demo models of tiles, with crops and without, of makers that have no file here."""

from collections.abc import Mapping
from dataclasses import replace

from vitwire_server.demo.demo_model import CLIP, HALF, IMAGENET, STEPS, TEXT, VISION, DemoModel, demo_vlm
from vitwire_server.demo.saving import save_ovis, save_step3

_QWEN2 = {"model_type": "qwen2", **TEXT}
_SIGLIP = {"model_type": "siglip_vision_model", **VISION, "patch_size": 14, "vision_use_head": False}

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
}
