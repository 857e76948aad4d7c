"""Parts of demo models of packed patches with `grid_thw`: text models, towers, tokens, processors' files."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from vitwire_server.demo.demo_model import CLIP, HALF, STEPS, TEXT, DemoModel, Json
from vitwire_server.towers.configs import Config
from vitwire_server.towers.family import Accepts, Family
from vitwire_server.towers.layouts.packed import PackedFamily, sizes
from vitwire_server.towers.registry import FAMILIES

_IMAGE_TOKENS = (16, 1280)
"""Bounds of an image's tokens, as the published processors have them."""

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
ROTARY_TEXT = {**TEXT, "pad_token_id": 0, "rope_parameters": {**ROPE, "mrope_section": [4, 2, 2]}}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
QWEN3_TEXT = {**ROTARY_TEXT, "head_dim": 16}
HYBRID = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "linear_conv_kernel_dim": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "shared_expert_intermediate_size": 64,
}
ROUTED = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}

TOWER = {"depth": 4, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "out_hidden_size": 64}
QWEN2_5_TOWER = {**TOWER, "fullatt_block_indexes": [1, 3]}
QWEN3_TOWER = {**TOWER, "num_position_embeddings": 256, "deepstack_visual_indexes": [1, 2]}
QWEN3_5_TOWER = {**TOWER, "num_position_embeddings": 256}
LAYERS = {"num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}

TOKENS = {"image_token_id": 500, "video_token_id": 501, "vision_start_token_id": 502, "vision_end_token_id": 503}
MARKED = {
    "image_token_id": 500,
    "video_token_id": 501,
    "image_start_token_id": 502,
    "image_end_token_id": 503,
    "video_start_token_id": 504,
    "video_end_token_id": 505,
}
INDEXED = {"image_token_index": 500, "video_token_index": 501, "audio_token_index": 506}
QWEN2_PROCESSORS = ("Qwen2VLImageProcessor", "Qwen2VLVideoProcessor")
QWEN3_PROCESSORS = ("Qwen2VLImageProcessor", "Qwen3VLVideoProcessor")

_OF_CLIPS: Mapping[str, Json] = {"video_llama_3": {"merge_size": 2}}
"""Settings of clips that differ from those of images."""


def whole(text: Mapping[str, Any], vision: Mapping[str, Any], more: Mapping[str, Any] = TOKENS) -> Json:
    """The configuration of a whole model; `more` are its own fields."""
    return {"text_config": dict(text), "vision_config": dict(vision), **more}


def packed_demo(
    model_type: str,
    config: Json,
    processors: tuple[str, str | None] = QWEN2_PROCESSORS,
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
