"""Demo models of packed patches with `grid_thw`, other than those of Qwen's and GLM's towers."""

from collections.abc import Mapping

from vitwire_server.demo.demo_model import TEXT, VISION, DemoModel, Json
from vitwire_server.demo.models.packed_parts import (
    INDEXED,
    LAYERS,
    MARKED,
    QWEN3_PROCESSORS,
    QWEN3_TEXT,
    ROPE,
    ROTARY_TEXT,
    ROUTED,
    TOKENS,
    TOWER,
    packed_demo,
    whole,
)
from vitwire_server.demo.saving import save_kimi, save_kimi_vl, save_videollama3

_DEEPSEEK_TEXT = {
    **ROTARY_TEXT,
    **ROUTED,
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "rope_parameters": ROPE,
}
_MINIMAX_TEXT = {
    **QWEN3_TEXT,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "dense_intermediate_size": 128,
    "shared_intermediate_size": 64,
    "rotary_dim": 8,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5},
}
_ERNIE_TEXT = {
    **ROTARY_TEXT,
    "rope_parameters": {**ROPE, "mrope_section": [3, 3, 2]},
    "moe_intermediate_size": [64, 64],
    "moe_k": 2,
    "moe_num_experts": 4,
    "moe_num_shared_experts": 1,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
}
_LFM3_TEXT: Json = {
    "model_type": "lfm3",
    **TEXT,
    "pad_token_id": 0,
    "head_dim": 16,
    "layer_types": ["conv", "sliding_attention", "full_attention"],
}

_KIMI_TOWER = {**LAYERS, "pos_emb_height": 8, "pos_emb_width": 8}
_LFM3_TOWER: Json = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "layer_types": ["conv", "full_attention", "conv", "full_attention"],
}

_VIDEO_LLAMA: Json = {
    "text_config": {"model_type": "qwen2", **TEXT, "pad_token_id": 0},
    "vision_config": {**VISION, "patch_size": 14},
    **TOKENS,
}
_KIMI = {**TOKENS, "projection_hidden_size": 64}

PACKED: Mapping[str, DemoModel] = {
    "kimi_k25": packed_demo(
        "kimi_k25",
        whole(_DEEPSEEK_TEXT, _KIMI_TOWER, _KIMI),
        ("Kimi_K25ImageProcessor", "Kimi_K25VideoProcessor"),
        save=save_kimi,
    ),
    "kimi_vl": packed_demo(
        "kimi_vl",
        whole(_DEEPSEEK_TEXT, {**_KIMI_TOWER, "pos_emb_time": 1}, _KIMI),
        base="kimi_k25",
        save=save_kimi_vl,
    ),
    "paddleocr_vl": packed_demo(
        "paddleocr_vl", whole(QWEN3_TEXT, {**LAYERS, "image_size": 112}), ("PaddleOCRVLImageProcessor", None)
    ),
    "minimax_m3_vl": packed_demo(
        "minimax_m3_vl",
        whole(_MINIMAX_TEXT, LAYERS, {**INDEXED, "projector_hidden_size": 96}),
        ("MiniMaxM3VLImageProcessor", "MiniMaxM3VLVideoProcessor"),
    ),
    "video_llama_3": packed_demo(
        "video_llama_3", _VIDEO_LLAMA, ("VideoLlama3ImageProcessor", "VideoLlama3VideoProcessor")
    ),
    "videollama3_qwen2": packed_demo(
        "videollama3_qwen2",
        _VIDEO_LLAMA,
        ("Videollama3ImageProcessor", None),
        base="video_llama_3",
        save=save_videollama3,
    ),
    "ernie4_5_vl_moe": packed_demo(
        "ernie4_5_vl_moe",
        whole(_ERNIE_TEXT, {**TOWER, "rms_norm_eps": 1e-6}, MARKED),
        ("Ernie4_5_VLMoeImageProcessor", "Ernie4_5_VLMoeVideoProcessor"),
    ),
    "lfm3_vl": packed_demo(
        "lfm3_vl", whole(_LFM3_TEXT, _LFM3_TOWER, {**TOKENS, "projector_hidden_size": 96}), QWEN3_PROCESSORS
    ),
}
"""By `model_type`."""
