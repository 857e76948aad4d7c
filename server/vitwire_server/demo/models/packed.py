"""Demo models of packed patches with `grid_thw`: an entry of `_CONFIGS` each."""

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from transformers import AutoModelForImageTextToText, AutoModelForMultimodalLM

from vitwire_server.demo.demo_model import CLIP, HALF, STEPS, TEXT, VISION, DemoModel, Json, save_plain
from vitwire_server.demo.saving import save_kimi, save_kimi_vl, save_qwen2_5_omni, save_videollama3
from vitwire_server.towers.configs import Config
from vitwire_server.towers.family import Accepts, Family
from vitwire_server.towers.layouts.packed import PackedFamily, sizes
from vitwire_server.towers.registry import FAMILIES

_IMAGE_TOKENS = (16, 1280)
"""Bounds of an image's tokens, as the published processors have them."""

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_TEXT = {**TEXT, "pad_token_id": 0, "rope_parameters": {**_ROPE, "mrope_section": [4, 2, 2]}}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
QWEN3_TEXT = {**_TEXT, "head_dim": 16}
HYBRID = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "linear_conv_kernel_dim": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "shared_expert_intermediate_size": 64,
}
GLM_TEXT = {**_TEXT, "rope_parameters": {**_ROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}}
ROUTED = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_DEEPSEEK_TEXT = {
    **_TEXT,
    **ROUTED,
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "rope_parameters": _ROPE,
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
    "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5},
}
_ERNIE_TEXT = {
    **_TEXT,
    "rope_parameters": {**_ROPE, "mrope_section": [3, 3, 2]},
    "moe_intermediate_size": [64, 64],
    "moe_k": 2,
    "moe_num_experts": 4,
    "moe_num_shared_experts": 1,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
}

TOWER = {"depth": 4, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "out_hidden_size": 64}
QWEN2_5_TOWER = {**TOWER, "fullatt_block_indexes": [1, 3]}
QWEN3_TOWER = {**TOWER, "num_position_embeddings": 256, "deepstack_visual_indexes": [1, 2]}
QWEN3_5_TOWER = {**TOWER, "num_position_embeddings": 256}
_GLM_TOWER = {**TOWER, "image_size": 112}
LAYERS = {"num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
_KIMI_TOWER = {**LAYERS, "pos_emb_height": 8, "pos_emb_width": 8}

TOKENS = {"image_token_id": 500, "video_token_id": 501, "vision_start_token_id": 502, "vision_end_token_id": 503}
MARKED = {
    "image_token_id": 500,
    "video_token_id": 501,
    "image_start_token_id": 502,
    "image_end_token_id": 503,
    "video_start_token_id": 504,
    "video_end_token_id": 505,
}
_INDEXED = {"image_token_index": 500, "video_token_index": 501, "audio_token_index": 506}
_STARTS = {"vision_start_token_id": 502, "vision_end_token_id": 503, "audio_start_token_id": 507}
_AUDIO = {
    "num_mel_bins": 8,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "d_model": 32,
    "n_window": 4,
    "output_dim": 64,
    "downsample_hidden_size": 8,
}


def whole(text: Mapping[str, Any], vision: Mapping[str, Any], more: Mapping[str, Any] = TOKENS) -> Json:
    """The configuration of a whole model; `more` are its own fields."""
    return {"text_config": dict(text), "vision_config": dict(vision), **more}


_THINKER_2_5 = whole(_TEXT, QWEN2_5_TOWER, {**_INDEXED, **_STARTS, "audio_config": _AUDIO})
_THINKER_3 = whole({**QWEN3_TEXT, **EXPERTS}, QWEN3_TOWER, {**TOKENS, "audio_config": _AUDIO})

_VIDEO_LLAMA: Json = {
    "text_config": {"model_type": "qwen2", **TEXT, "pad_token_id": 0},
    "vision_config": {**VISION, "patch_size": 14},
    **TOKENS,
}

_CONFIGS: Mapping[str, Json] = {
    "qwen2_vl": whole(_TEXT, {"depth": 4, "embed_dim": 64, "hidden_size": 64, "num_heads": 4, "mlp_ratio": 2}),
    "qwen2_5_vl": whole(_TEXT, QWEN2_5_TOWER),
    "qwen3_vl": whole(QWEN3_TEXT, QWEN3_TOWER),
    "qwen3_vl_moe": whole({**QWEN3_TEXT, **EXPERTS}, QWEN3_TOWER),
    "qwen3_5": whole({**QWEN3_TEXT, **HYBRID}, QWEN3_5_TOWER),
    "qwen3_5_moe": whole({**QWEN3_TEXT, **HYBRID, **EXPERTS}, QWEN3_5_TOWER),
    "qwen2_5_omni": {"thinker_config": _THINKER_2_5, "enable_audio_output": False},
    "qwen2_5_omni_thinker": _THINKER_2_5,
    "qwen3_omni_moe": {"thinker_config": _THINKER_3, "enable_audio_output": False},
    "qwen3_omni_moe_thinker": _THINKER_3,
    "glm4v": whole(GLM_TEXT, _GLM_TOWER, MARKED),
    "glm46v": whole(GLM_TEXT, {"model_type": "glm4v_vision", **_GLM_TOWER}, MARKED),
    "glm4v_moe": whole({**GLM_TEXT, **ROUTED}, _GLM_TOWER, MARKED),
    "glm_ocr": whole(GLM_TEXT, _GLM_TOWER, MARKED),
    "kimi_k25": whole(_DEEPSEEK_TEXT, _KIMI_TOWER, {**TOKENS, "projection_hidden_size": 64}),
    "kimi_vl": whole(_DEEPSEEK_TEXT, {**_KIMI_TOWER, "pos_emb_time": 1}, {**TOKENS, "projection_hidden_size": 64}),
    "paddleocr_vl": whole(QWEN3_TEXT, {**LAYERS, "image_size": 112}),
    "minimax_m3_vl": whole(_MINIMAX_TEXT, LAYERS, {**_INDEXED, "projector_hidden_size": 96}),
    "video_llama_3": _VIDEO_LLAMA,
    "videollama3_qwen2": _VIDEO_LLAMA,
    "ernie4_5_vl_moe": whole(_ERNIE_TEXT, {**TOWER, "rms_norm_eps": 1e-6}, MARKED),
}
_QWEN = ("Qwen2VLImageProcessor", "Qwen2VLVideoProcessor")
_GLM = ("Glm4vImageProcessor", "Glm4vVideoProcessor")
_PROCESSORS: Mapping[str, tuple[str, str | None]] = {
    "qwen3_vl": (_QWEN[0], "Qwen3VLVideoProcessor"),
    "qwen3_vl_moe": (_QWEN[0], "Qwen3VLVideoProcessor"),
    "qwen3_5": (_QWEN[0], "Qwen3VLVideoProcessor"),
    "qwen3_5_moe": (_QWEN[0], "Qwen3VLVideoProcessor"),
    "glm4v": _GLM,
    "glm46v": ("Glm46VImageProcessor", "Glm46VVideoProcessor"),
    "glm4v_moe": _GLM,
    "glm_ocr": ("Glm46VImageProcessor", "Glm46VVideoProcessor"),
    "kimi_k25": ("Kimi_K25ImageProcessor", "Kimi_K25VideoProcessor"),
    "paddleocr_vl": ("PaddleOCRVLImageProcessor", None),
    "minimax_m3_vl": ("MiniMaxM3VLImageProcessor", "MiniMaxM3VLVideoProcessor"),
    "video_llama_3": ("VideoLlama3ImageProcessor", "VideoLlama3VideoProcessor"),
    "videollama3_qwen2": ("Videollama3ImageProcessor", None),
    "ernie4_5_vl_moe": ("Ernie4_5_VLMoeImageProcessor", "Ernie4_5_VLMoeVideoProcessor"),
}

_OF_CLIPS: Mapping[str, Json] = {"video_llama_3": {"merge_size": 2}}
"""Settings of clips that differ from those of images."""


def packed_demo(
    model_type: str,
    config: Json,
    processors: tuple[str, str | None] = _QWEN,
    **others: Any,  # noqa: ANN401 - those of DemoModel
) -> DemoModel:
    """A demo model of packed patches; `processors` are the classes of its image and video processors."""
    return DemoModel(config=config, files=partial(_files, FAMILIES[model_type], processors), **others)


def _files(family: Family, processors: tuple[str, str | None], config: Config) -> dict[str, Json]:
    assert isinstance(family, PackedFamily)
    size = sizes(family.tower.configuration(config))
    shared = {
        **STEPS,
        **(HALF if size.patch == 16 or family.images is Accepts.PIXELS else CLIP),
        "merge_size": size.merge,
        "patch_size": size.patch,
        "resample": 3,
        "temporal_patch_size": size.temporal,
    }
    image_type, video_type = processors
    area = (size.patch * size.merge) ** 2
    size_bounds = (
        {"size": {"max_height": 512, "max_width": 512}, "max_patches": 16384}
        if family.images is Accepts.PIXELS
        else _size(*(tokens * area for tokens in _IMAGE_TOKENS))
    )
    files = {"preprocessor_config.json": {**shared, "image_processor_type": image_type, **size_bounds}}
    bounds = family.video_areas.pixels
    if video_type and bounds and family.videos is not Accepts.NOTHING:
        video = {"video_processor_type": video_type, **_size(*bounds)}
        files["video_preprocessor_config.json"] = {**shared, **video, **_OF_CLIPS.get(family.model_type, {})}
    return files


def _size(smallest: int, largest: int) -> Json:
    return {"size": {"shortest_edge": smallest, "longest_edge": largest}}


_SAVE = {
    "kimi_k25": save_kimi,
    "kimi_vl": save_kimi_vl,
    "qwen2_5_omni": save_qwen2_5_omni,
    "videollama3_qwen2": save_videollama3,
}
_BASE = {"kimi_vl": "kimi_k25", "videollama3_qwen2": "video_llama_3"}
_AUTO = dict.fromkeys(("qwen2_5_omni", "qwen3_omni_moe"), AutoModelForMultimodalLM)
"""Omni models are whole only with their talkers, even if those are switched off."""

PACKED: Mapping[str, DemoModel] = MappingProxyType(
    {
        model_type: packed_demo(
            model_type,
            config,
            _PROCESSORS.get(model_type, _QWEN),
            base=_BASE.get(model_type),
            auto=_AUTO.get(model_type, AutoModelForImageTextToText),
            save=_SAVE.get(model_type, save_plain),
        )
        for model_type, config in _CONFIGS.items()
    }
)
