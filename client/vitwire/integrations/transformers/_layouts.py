"""How each model takes pixels."""

from collections.abc import Mapping
from dataclasses import replace

from vitwire.integrations.transformers._layout import (
    Layout,
    joined,
    one_each,
    one_each_unless_listed,
    stacked,
)
from vitwire.integrations.transformers._line_breaks import added_rows, framed, with_line_breaks
from vitwire.integrations.transformers._llava import (
    cut_images,
    layouts_of_images,
    packed,
    packed_next,
    packed_or_pooled,
)
from vitwire.integrations.transformers._prompts import (
    filled_tiles,
    marked_tiles,
    of_prompts,
    path_of_docling,
    routed_output,
    whole_tiles,
)
from vitwire.integrations.transformers._replaced import indicators, placed_in_prompt, projected_states, with_blank_tiles

_LISTED = Layout()
"""The arguments say the size of each item."""
_TILES = Layout(tiles=one_each, features=stacked)
_PADDED_TILES = of_prompts(whole_tiles)
_PADDED_IMAGES = Layout(features=of_prompts(filled_tiles).features)
"""Images of any size, whose patches the client cuts."""

LAYOUTS: Mapping[str, Layout] = {
    "qwen2_vl": _LISTED,
    "qwen2_5_vl": _LISTED,
    "qwen3_vl": _LISTED,
    "qwen3_vl_moe": _LISTED,
    "qwen3_5": _LISTED,
    "qwen3_5_moe": _LISTED,
    "qwen4_exp": _LISTED,
    "cosmos3_omni": _LISTED,
    "cosmos3_edge": _LISTED,
    "cohere_compass": _LISTED,
    "lfm3_vl": _LISTED,
    "hyperclovax_vision_v2": _LISTED,
    "qwen2_5_omni_thinker": _LISTED,
    "qwen3_omni_moe_thinker": _LISTED,
    "glm4v": _LISTED,
    "glm46v": _LISTED,
    "glm4v_moe": _LISTED,
    "glm_ocr": _LISTED,
    "glmga": _LISTED,
    "glm5_next": _LISTED,
    "kimi_k25": _LISTED,
    "paddleocr_vl": _LISTED,
    "minimax_m3_vl": _LISTED,
    "ernie4_5_vl_moe": _LISTED,
    "internvl": _TILES,
    "llava_next_video": Layout(tiles=layouts_of_images, features=packed_or_pooled),
    "llava_next": Layout(tiles=cut_images, features=packed_next),
    "llava_onevision": Layout(tiles=cut_images, features=packed),
    "qianfan_ocr": _TILES,
    "aya_vision": _TILES,
    "cohere2_vision": _TILES,
    "got_ocr2": _TILES,
    "janus": _TILES,
    "gemma4": _LISTED,
    "diffusion_gemma": Layout(features=joined),
    "gemma3": _TILES,
    "t5gemma2_encoder": _TILES,
    "paligemma": _TILES,
    "vipllava": _TILES,
    "deepseek_vl": _TILES,
    "deepseek_vl_hybrid": Layout(features=stacked),
    "deepseek_ocr2": _LISTED,
    "unlimited_ocr": Layout(features=with_line_breaks),
    "hunyuan_vl": Layout(features=framed, added=added_rows),
    "aria": Layout(features=stacked),
    "mllama": Layout(
        replaces="vision_model", returns=projected_states, attributes=("num_patches",), cut=with_blank_tiles
    ),
    "phi4_multimodal": Layout(replaces="embed_tokens_extend.image_embed", returns=placed_in_prompt),
    "florence2": _TILES,
    "llama4": Layout(tiles=one_each, features=stacked, before_projector=True),
    "ovis2": Layout(tiles=one_each, features=stacked, beside=indicators),
    "step3p7": _LISTED,
    "llava": Layout(tiles=one_each_unless_listed),
    "mistral3": _LISTED,
    "idefics3": _PADDED_TILES,
    "smolvlm": _PADDED_TILES,
    "idefics2": _PADDED_IMAGES,
    "lfm2_vl": _LISTED,
    "mistral_large4": _LISTED,
    "lighton_ocr": _LISTED,
    "minicpmv4_6": _LISTED,
    "minicpmv4_7": _LISTED,
    "minicpm_ocr": _LISTED,
    "nemotron_h_omni": _LISTED,
    "muse_glimmer": _LISTED,
    "muse_spark": _LISTED,
    "granite_docling": replace(of_prompts(marked_tiles, path_of_docling), deepstack_output=routed_output),
    "video_llama_3": _LISTED,
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
}
"""Checkpoints of another layout, or with more parts, of the same tower."""


def tower_type(model_type: str) -> str:
    """The name in `LAYOUTS`, if it is there, of a model or of the service that has its tower."""
    return _SAME.get(model_type, model_type)
