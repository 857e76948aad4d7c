"""The rules that make a small configuration of a model's default one, and settings of processors for its size."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import fields
from typing import Any

import transformers
from transformers import PreTrainedConfig
from transformers.models.auto import image_processing_auto
from transformers.models.auto.auto_mappings import VIDEO_PROCESSOR_MAPPING_NAMES

from vitwire_server.towers.configs import Config
from vitwire_server.towers.family import Accepts, Family
from vitwire_server.towers.layouts.packed import PackedFamily, sizes

Json = dict[str, Any]

_ENDINGS_BY_SIZE = {
    8192: "max_position_embeddings",
    512: "vocab_size vocab_size_per_layer_input",
    256: "num_position_embeddings",
    128: "position_embedding_size",
    112: "crop_size max_image_size max_img_size",
    96: "intermediate_size intermediate_size_mlp mlp_dim d_ff ffn_dim projector_hidden_size",
    64: "hidden_size embed_dim d_model projection_size projector_input_dim output_dim num_patches index_topk"
    " num_embeddings image_token_embed_dim downsample_channels prediction_head_size",
    56: "image_size",
    48: "projection_dim",
    32: "lora_rank moe_hidden_size base_channels latent_channels num_pos_feats",
    16: "head_dim d_kv ssm_state_size query_pre_attn_scalar mm_tokens_per_image output_channels num_mel_bins"
    " n_window downsample_hidden_size embedding_dim out_channel conv_channels",
    8: "qk_rope_head_dim rotary_dim pos_emb_height pos_emb_width hc_lowrank canvas_length",
    4: "depth heads experts resampler_n_latents index_kpool",
    3: "hidden_layers num_layers encoder_layers decoder_layers global_layers",
    2: "num_blocks resampler_depth index_n_heads linear_num_key_heads conv_kernel_dim experts_per_tok moe_k"
    " top_k_experts hc_mult mlp_ratio num_res_blocks",
    1: "n_group topk_group n_groups first_k_dense_replace insert_layer_id moe_topk shared_experts",
    0: "vision_use_head tie_word_embeddings",
}
_AT_MOST = {ending: size for size, endings in _ENDINGS_BY_SIZE.items() for ending in endings.split()}
"""By the ends of fields' names, of which the longest counts."""
_KINDS = ("layer_types", "mlp_layer_types", "layers_block_type")
_INDEXES = (
    "deepstack_visual_indexes", "fullatt_block_indexes", "global_attn_indexes", "intermediate_layers_indices",
)  # fmt: skip
_SIDES = ("image_size", "max_img_size", "max_image_size", "num_patches", "position_embedding_size")
"""Configurations with one of these have a table of positions of few patches."""
_SPECIAL = "pad bos eos cls sep"
"""Tokens 0 to 4."""
_MARKS = "user boa eoa boi eoi image video vision_start vision_end video_start video_end audio audio_start audio_end"
"""Tokens 495 to 508."""
_NUMBERS = {mark: i for names, first in ((_SPECIAL, 0), (_MARKS, 495)) for i, mark in enumerate(names.split(), first)}
_NUMBERS |= {"image_start": 502, "image_end": 503}
_NEEDED = ("image_token_id", "video_token_id")
"""Tokens that have a number even if a default is missing."""
MROPE: Json = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
PINPOINTS = [[56 * h, 56 * w] for h in (1, 2, 3) for w in (1, 2, 3)]
_FIXED: Json = {f"{mark}_token_{kind}": number for mark, number in _NUMBERS.items() for kind in ("id", "index")}
_FIXED["image_grid_pinpoints"] = PINPOINTS
_CLASSES: Mapping[str, Mapping[str, str]] = vars(image_processing_auto)["IMAGE_PROCESSOR_MAPPING_NAMES"]
"""Names of image processors' classes by model and by what they are written for."""
CLIP: Json = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
IMAGENET: Json = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
HALF: Json = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
STEPS: Json = {
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "rescale_factor": 1 / 255,
}
"""Steps of most processors."""
_IMAGE_TOKENS = (16, 1280)
"""Bounds of an image's tokens, as the published processors have them."""
_OF_IMAGES = ("image_processor_type", "crop_to_patches", "image_grid_pinpoints", "max_patches", "min_patches")
"""Settings that video processors do not have."""
_MARGIN = 8
"""Pixels cut off an image whose shorter side is resized to its tile's and this."""


def shrunk(kind: type[PreTrainedConfig], given: Mapping[str, Any]) -> Json:
    """Arguments of a configuration of this class: those `given`, and small ones for the sizes of its defaults.

    Structure is kept: merges, grouped queries, kinds of layers. What the class derives of sizes it derives of small
    ones.
    """
    usual = kind(**deepcopy(dict(given)))
    usual.allow_global_per_layer_attribute_access = True
    small: Json = {}
    names = [field.name for field in fields(kind)]
    depth = next((name for name in ("depth", "num_hidden_layers") if name in names), "")
    before = getattr(kind(), depth, 0)
    layers = given.get(depth, min(before, _most(depth, before, usual) or before))
    for name in names:
        value = getattr(usual, name, None)
        if isinstance(value, PreTrainedConfig):
            small[name] = {"model_type": value.model_type, **shrunk(type(value), given.get(name, {}))}
        elif name not in given and (value is not None or name in _NEEDED):
            found = _shrunk(name, value, usual, before, layers)
            if found != value:
                small[name] = found
    return {**given, **small}


def _shrunk(name: str, value: Any, usual: Any, before: int, layers: int) -> Any:  # noqa: ANN401 - fields of any type
    if name in _FIXED:
        return deepcopy(_FIXED[name])
    if name in _KINDS:
        return _kinds(value, layers)
    if name in _INDEXES:
        return _indexes(value, before, layers)
    if name == "rope_parameters":
        return deepcopy(MROPE) if "mrope_section" in getattr(usual, "ignore_keys_at_rope_validation", ()) else value
    most = _most(name, value, usual)
    return value if most is None or isinstance(value, (str, Mapping)) else _bounded(value, most)


def _most(name: str, value: object, usual: object) -> int | None:
    """The largest value of a field; None without one."""
    if name == "num_key_value_heads":  # shared by as many query heads, or by none
        return 4 if value == getattr(usual, "num_attention_heads", 0) else 2
    if name == "patch_size":
        return 14 if isinstance(value, int) and any(hasattr(usual, side) for side in _SIDES) else None
    endings = [ending for ending in _AT_MOST if name.endswith(ending)]
    return _AT_MOST[max(endings, key=len)] if endings else None


def _bounded(value: Any, most: int) -> Any:  # noqa: ANN401 - numbers, flags, lists of numbers
    if isinstance(value, (list, tuple)):
        return [min(each, most) for each in value]
    return type(value)(min(value, most))


def _kinds(values: Sequence[str], layers: int) -> list[str]:
    """The first ones, the last of which are replaced by the kinds that are missing."""
    kept = list(values[:layers])
    missing = [kind for kind in dict.fromkeys(values) if kind not in kept]
    return [*kept[: len(kept) - len(missing)], *missing]


def _indexes(values: Sequence[int], before: int, layers: int) -> list[int]:
    """Indexes at the same shares of the layers; every other one if they would be more than half of these."""
    scaled = sorted({value * layers // before for value in values})
    return scaled if 2 * len(scaled) <= layers else scaled[::-2][::-1]


def image_settings(model_type: str, family: Family, config: Config, written: Mapping[str, Any]) -> Json:
    """Settings of the image processor of `model_type`; `written` are those that are not derived."""
    names = _CLASSES[_listed(model_type)]
    settings = {**STEPS, "resample": 3, "image_processor_type": names["torchvision"]}
    if "pil" in names:  # without torchvision, the defaults of other classes cannot be read
        usual = getattr(transformers, names["pil"])().to_dict()
        settings = {**STEPS, **{name: value for name, value in usual.items() if value is not None}}
    settings |= written
    return {**settings, **_sized(settings, family, config), **written}


def video_settings(model_type: str, family: Family, image: Mapping[str, Any], written: Mapping[str, Any]) -> Json:
    """Settings of the video processor, which are those of images but for sizes; none if there is no such processor."""
    if _listed(model_type) not in VIDEO_PROCESSOR_MAPPING_NAMES or "video_sampling" in image:
        return {}
    bounds = family.video_areas.pixels if isinstance(family, PackedFamily) else None
    areas = _areas(*bounds) if bounds else {}
    return {**{name: value for name, value in image.items() if name not in _OF_IMAGES}, **areas, **written}


def _listed(model_type: str) -> str:
    """The model, or the one that it is a part or a variant of, by its name."""
    return max((name for name in _CLASSES if model_type.startswith(name)), key=len)


def _sized(image: Json, family: Family, config: Config) -> Json:
    """Sizes of the processor that follow from those of the tower."""
    tower = _tower(family, config)
    if isinstance(family, PackedFamily):
        size = sizes(tower)
        area = (size.patch * size.merge) ** 2
        known = {"merge_size": size.merge, "patch_size": size.patch, "temporal_patch_size": size.temporal}
        if family.images is Accepts.PIXELS:
            return {**known, "size": {"max_height": 512, "max_width": 512}, "max_patches": 16384}
        return {**known, **_areas(_IMAGE_TOKENS[0] * area, _IMAGE_TOKENS[1] * area)}
    found: Json = {}
    if "image_grid_pinpoints" in image:
        found["image_grid_pinpoints"] = PINPOINTS
    if "max_patches" in image:
        found["max_patches"] = 6
    if "patch_size" in image and hasattr(tower, "patch_size"):
        found["patch_size"] = tower.patch_size
    if hasattr(tower, "image_size"):
        side = tower.image_size if isinstance(tower.image_size, int) else tower.image_size[0]
        found |= _sides(image, side)
    return found


def _tower(family: Family, config: Config) -> Config:
    whole = config if hasattr(config, family.tower.config.partition(".")[0]) or not family.tower.config else None
    return family.tower.configuration(whole or getattr(config, "vlm_config", None) or config.encoder)


def _sides(image: Json, side: int) -> Json:
    """Sizes of tiles of this side."""
    square, around = {"height": side, "width": side}, side + (0 if "image_grid_pinpoints" in image else _MARGIN)
    if isinstance(image.get("max_image_size"), dict):
        return {"max_image_size": {"longest_edge": side}, "size": {"longest_edge": 4 * side}}
    if image.get("do_center_crop"):
        shorter = {"height": around, "width": around} if "height" in image["size"] else {"shortest_edge": around}
        return {"crop_size": square, "size": shorter}
    return {"size": square} if "height" in image.get("size", {}) else {}


def _areas(smallest: int, largest: int) -> Json:
    return {"size": {"shortest_edge": smallest, "longest_edge": largest}}
