"""Demo models with Pixtral's tower (Mistral AI), in Mistral's language models and in others."""

from collections.abc import Mapping

from vitwire_server.demo.demo_model import CLIP, TEXT, VISION, DemoModel, demo_vlm

_TOWER = {"model_type": "pixtral", **VISION, "head_dim": 16, "image_size": 448, "patch_size": 14}
_IMAGE = {
    **CLIP,
    "image_processor_type": "PixtralImageProcessor",
    "patch_size": 14,
    "resample": 3,
    "size": {"longest_edge": 448},
}
_MERGED = {**_IMAGE, "patch_size": 28}
_LATENT = {
    **TEXT,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "kv_lora_rank": 32,
    "moe_intermediate_size": 64,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}

PIXTRAL: Mapping[str, DemoModel] = {
    "llava-pixtral": demo_vlm(
        base="llava",
        text={"model_type": "mistral", **TEXT, "head_dim": 16},
        vision=_TOWER,
        image=_IMAGE,
        fields={
            "image_token_index": 500,
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
        },
    ),
    "mistral3": demo_vlm(
        text={"model_type": "mistral", **TEXT, "head_dim": 16},
        vision=_TOWER,
        image=_IMAGE,
        fields={"image_token_index": 500, "spatial_merge_size": 2, "vision_feature_layer": -1},
    ),
    "mistral_large4": demo_vlm(
        text=_LATENT,
        vision=_TOWER,
        image=_MERGED,
        fields={"image_token_index": 500, "spatial_merge_size": 2, "vision_feature_layer": -1},
    ),
    "lighton_ocr": demo_vlm(
        text={"model_type": "qwen3", **TEXT, "head_dim": 16},
        vision=_TOWER,
        image=_MERGED,
        fields={"image_token_id": 500, "spatial_merge_size": 2},
    ),
}
"""By `model_type`. Pixtral's own is that of LLaVA, which its checkpoints are written as."""
