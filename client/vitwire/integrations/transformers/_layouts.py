"""The form of pixels that each model takes."""

from collections.abc import Mapping
from dataclasses import replace

from vitwire.integrations.transformers import _arrangements as rows
from vitwire.integrations.transformers._features import Layout

_PADDED_TILES = rows.of_prompts(rows.whole_tiles)
_PADDED_IMAGES = Layout(features=rows.of_prompts(rows.filled_tiles).features)
"""Images of any size, whose patches the client cuts."""

_LISTED = (
    "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "qwen4_exp",
    "cosmos3_omni", "cosmos3_edge", "cohere_compass", "lfm3_vl", "hyperclovax_vision_v2",
    "qwen2_5_omni_thinker", "qwen3_omni_moe_thinker", "glm4v", "glm46v", "glm4v_moe", "glm_ocr", "glmga",
    "glm5_next", "kimi_k25", "paddleocr_vl", "minimax_m3_vl", "ernie4_5_vl_moe", "gemma4", "deepseek_ocr2",
    "step3p7", "mistral3", "lfm2_vl", "mistral_large4", "lighton_ocr", "minicpmv4_6", "minicpmv4_7",
    "minicpm_ocr", "nemotron_h_omni", "muse_glimmer", "muse_spark", "video_llama_3",
)  # fmt: skip
"""Models whose arguments say the size of each item."""
_TILES = (
    "internvl", "qianfan_ocr", "aya_vision", "cohere2_vision", "got_ocr2", "janus", "gemma3",
    "t5gemma2_encoder", "paligemma", "vipllava", "deepseek_vl", "florence2",
)  # fmt: skip
"""Models of which each tile is an item."""

LAYOUTS: Mapping[str, Layout] = {
    **dict.fromkeys(_LISTED, Layout()),
    **dict.fromkeys(_TILES, Layout(tiles=rows.one_each, features=rows.stacked)),
    "llava_next_video": Layout(tiles=rows.layouts_of_images, features=rows.packed_or_pooled),
    "llava_next": Layout(tiles=rows.cut_images, features=rows.packed_next),
    "llava_onevision": Layout(tiles=rows.cut_images, features=rows.packed),
    "diffusion_gemma": Layout(features=rows.joined),
    "deepseek_vl_hybrid": Layout(features=rows.stacked),
    "unlimited_ocr": Layout(features=rows.with_line_breaks),
    "hunyuan_vl": Layout(features=rows.framed, added=rows.added_rows),
    "aria": Layout(features=rows.stacked),
    "mllama": Layout(
        replaces="vision_model", features=rows.projected_states, attributes=("num_patches",), cut=rows.with_blank_tiles
    ),
    "phi4_multimodal": Layout(replaces="embed_tokens_extend.image_embed", features=rows.placed_in_prompt),
    "llama4": Layout(tiles=rows.one_each, features=rows.stacked, before_projector=True),
    "ovis2": Layout(tiles=rows.one_each, features=rows.stacked, beside=rows.indicators),
    "llava": Layout(tiles=rows.one_each_unless_listed),
    "idefics3": _PADDED_TILES,
    "smolvlm": _PADDED_TILES,
    "idefics2": _PADDED_IMAGES,
    "granite_docling": replace(
        rows.of_prompts(rows.marked_tiles, rows.path_of_docling), deepstack_output=rows.routed_output
    ),
}
"""By the `model_type` of the module that has the methods."""

_SAME = {
    "qwen2_5_omni": "qwen2_5_omni_thinker",
    "qwen3_omni_moe": "qwen3_omni_moe_thinker",
    "internvl_chat": "internvl",
    "vlm": "hyperclovax_vision_v2",
    "ovis": "ovis2",
    "t5gemma2": "t5gemma2_encoder",
    "phi4mm": "phi4_multimodal",
    "videollama3_qwen2": "video_llama_3",
    "step3_vl": "step3p7",
    "step_robotics": "step3p7",
    "unlimited-ocr": "unlimited_ocr",
}
"""Checkpoints of another layout, or with more parts, of the same tower."""


def tower_type(model_type: str) -> str:
    """The name in `LAYOUTS`, if it is there, of a model or of the service that has its tower."""
    return _SAME.get(model_type, model_type)
