"""Models that transformers has no classes for, made of parts under their published names."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.internvl.configuration_internvl import InternVLConfig
from transformers.models.internvl.modeling_internvl import InternVLMultiModalProjector
from transformers.models.siglip.modeling_siglip import SiglipVisionModel

from vitwire_server.demo.saving import Save, save_published, taken
from vitwire_server.demo.shrinking import Json
from vitwire_server.towers.configs import Config
from vitwire_server.towers.family import Family
from vitwire_server.towers.models.deepseek import DownsampleProjector
from vitwire_server.towers.models.internvl import NvlmProjector
from vitwire_server.towers.shared.parts import SingleParameter
from vitwire_server.towers.shared.resamplers import Resampler

_LLM: Any = AutoModelForCausalLM
Build = Callable[..., Any]
"""Makes a model of its configuration, with weights of `dtype`."""


def nvlm(config: InternVLConfig, dtype: torch.dtype) -> nn.Module:
    model: Any = AutoModelForImageTextToText.from_config(config, dtype=dtype)
    model.model.multi_modal_projector = NvlmProjector(config).to(dtype)
    return model  # type: ignore[no-any-return]


def assembled(parts: Callable[[Any], Mapping[str, nn.Module]]) -> Build:
    """Builds a model of its parts."""

    def build(config: Config, dtype: torch.dtype) -> nn.Module:
        whole: Any = nn.ModuleDict(parts(config)).to(dtype)
        whole.config, whole.can_generate = config, lambda: False
        return whole  # type: ignore[no-any-return]

    return build


def of_row(row: Family, config: Config, dtype: torch.dtype) -> nn.Module:
    """The modules of an entry of the table by their names there, and one layer in place of the language model's."""
    made = {name: module.make(module.configuration(config)) for name, module in row.modules.items()}
    model: nn.Module = assembled(lambda _: {**made, "llm": nn.Linear(512, 256)})(config, dtype)
    return model


MINICPM = assembled(
    lambda config: {
        "vpm": SiglipVisionModel(config.vision_config),
        "resampler": Resampler(config),
        "llm": _LLM.from_config(config.text_config),
    }
)
EAGLE = assembled(
    lambda config: {
        "vision_model": nn.ModuleDict({"vision_model": SiglipVisionModel(config.vision_config)}),
        "mlp1": InternVLMultiModalProjector(config),
        "language_model": _LLM.from_config(config.text_config),
    }
)
DEEPSEEK = assembled(
    lambda config: {
        "vision": SiglipVisionModel(config.vision_config),
        "projector": DownsampleProjector(config),
        "language": _LLM.from_config(config.text_config),
        "image_newline": SingleParameter(config.text_config.hidden_size),
        "view_seperator": SingleParameter(config.text_config.hidden_size),
    }
)


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

    return save_published(settings)


def _eagle(whole: Json) -> Json:
    return {
        "architectures": ["Eagle2_5_VLForConditionalGeneration"],
        "model_type": "eagle_2_5_vl",
        "select_layer": -1,
        **taken(whole, "downsample_ratio text_config vision_config"),
    }


_EAGLE_NAMES = (
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
    (r"^vision\.embeddings\.patch_embedding\.", "vision.patch_embed.proj."),
    (r"^vision\.embeddings\.position_embedding\.weight$", "vision.pos_embed"),
    (r"^vision\.post_layernorm\.", "vision.norm."),
    (r"^vision\.encoder\.layers\.", "vision.blocks."),
    (r"^(vision\..*)\.layer_norm([12])\.", r"\1.norm\2."),
    (r"^(vision\..*)\.self_attn\.out_proj\.", r"\1.attn.proj."),
    (r"^(vision\..*)\.self_attn\.", r"\1.attn."),
    (r"^(image_newline|view_seperator)\.weight$", r"\1"),
)
save_deepseek = save_published(_deepseek, _TIMM_NAMES, fused=True)
