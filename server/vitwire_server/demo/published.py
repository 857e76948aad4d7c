"""Models that transformers has no classes for: others with parts of theirs, under their published names."""

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForImageTextToText

from vitwire_server.demo.saving import Names, Save, save_published, taken
from vitwire_server.demo.shrinking import Json
from vitwire_server.towers.configs import Config
from vitwire_server.towers.registry import FAMILIES

Build = Callable[..., Any]
"""Makes a model of its configuration, with weights of `dtype`."""


def fitted(model_type: str, **paths: str) -> Build:
    """Builds a model with modules of this entry of the table, by name, in place of those at these paths."""

    def build(config: Config, dtype: torch.dtype) -> nn.Module:
        model: Any = AutoModelForImageTextToText.from_config(config, dtype=dtype)
        for name, path in paths.items():
            module = FAMILIES[model_type].modules[name]
            model.set_submodule(path, module.make(module.configuration(config)).to(dtype))
        return model  # type: ignore[no-any-return]

    return build


def _named(tower: str, projector: str, language: str) -> Names:
    """From the names of a DeepSeek-VL, which the demo models are built as, to these."""
    parts = {"model.vision_model": tower, "model.aligner": projector, "model.language_model": f"{language}.model"}
    parts["lm_head"] = f"{language}.lm_head"
    return tuple((f"^{re.escape(own)}", name) for own, name in parts.items())


def save_minicpm(model_type: str, architecture: str) -> Save:
    """As OpenBMB writes it: the language model's fields are those of the whole."""

    def settings(whole: Json) -> Json:
        return {
            **whole["text_config"],
            "architectures": [architecture],
            "model_type": model_type,
            "version": 2.6,
            "drop_vision_last_layer": False,
            "query_num": whole["query_num"],
            "slice_config": {"max_slice_nums": 9, "patch_size": 14, "scale_resolution": 448},
            "vision_config": {**whole["vision_config"], "model_type": "siglip"},
        }

    return save_published(settings, _named("vpm", "resampler", "llm"))


def _eagle(whole: Json) -> Json:
    return {
        "architectures": ["Eagle2_5_VLForConditionalGeneration"],
        "model_type": "eagle_2_5_vl",
        "select_layer": -1,
        **taken(whole, "downsample_ratio text_config vision_config"),
    }


_EAGLE_NAMES = (
    *_named("vision_model.vision_model", "mlp1", "language_model"),
    (r"^mlp1\.layer_norm\.", "mlp1.0."),
    (r"^mlp1\.linear_1\.", "mlp1.1."),
    (r"^mlp1\.linear_2\.", "mlp1.3."),
)
save_eagle = save_published(_eagle, _EAGLE_NAMES)


def _deepseek(whole: Json) -> Json:
    vision = whole["vision_config"]
    same = "num_attention_heads:heads image_size num_hidden_layers:layers patch_size hidden_size:width"
    return {
        "candidate_resolutions": whole["processor"]["candidate_resolutions"],
        "global_view_pos": "head",
        "language_config": {**whole["text_config"], "model_type": "deepseek_v2"},
        "model_type": "deepseek_vl_v2",
        "projector_config": {"model_type": "mlp_projector", **whole["projector"]},
        "tile_tag": "2D",
        "vision_config": {
            **taken(vision, same),
            "mlp_ratio": vision["intermediate_size"] / vision["hidden_size"],
            "model_name": "siglip_so400m_patch14_384",
            "model_type": "vision",
        },
    }


_TIMM_NAMES = (
    *_named("vision", "projector", "language"),
    (r"^vision\.embeddings\.patch_embedding\.", "vision.patch_embed.proj."),
    (r"^vision\.embeddings\.position_embedding\.weight$", "vision.pos_embed"),
    (r"^vision\.post_layernorm\.", "vision.norm."),
    (r"^vision\.encoder\.layers\.", "vision.blocks."),
    (r"^(vision\..*)\.layer_norm([12])\.", r"\1.norm\2."),
    (r"^(vision\..*)\.self_attn\.out_proj\.", r"\1.attn.proj."),
    (r"^(vision\..*)\.self_attn\.", r"\1.attn."),
)
save_deepseek = save_published(_deepseek, _TIMM_NAMES, fused=True)
