"""Demo models in layouts that their authors publish, which transformers has no classes for."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.models.internvl.modeling_internvl import InternVLMultiModalProjector
from transformers.models.siglip.modeling_siglip import SiglipVisionModel

from vitwire_server.demo.demo_model import HALF, SHARD, TEXT, VISION, DemoModel, Json, demo_vlm, write_json
from vitwire_server.demo.models.internvl import INTERNVL
from vitwire_server.demo.saving import save_internvl
from vitwire_server.towers.configs import Config
from vitwire_server.towers.models.deepseek import DownsampleProjector
from vitwire_server.towers.models.internvl import NvlmProjector
from vitwire_server.towers.shared.modules import SingleParameter
from vitwire_server.towers.shared.resampler import Resampler

_LLAMA = {"model_type": "llama", **TEXT}
_SIGLIP = {"model_type": "siglip_vision_model", **VISION, "patch_size": 14, "vision_use_head": False}


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


class _Nvlm:
    """Builds InternVL with NVLM-D's projector."""

    @staticmethod
    def from_config(config: Config, dtype: torch.dtype) -> PreTrainedModel:
        model: Any = AutoModelForImageTextToText.from_config(config, dtype=dtype)
        model.model.multi_modal_projector = NvlmProjector(config).to(dtype)
        whole: PreTrainedModel = model
        return whole


class _Whole(nn.Module):
    """Modules of a model that transformers has no class for, under their published names."""

    def __init__(self, parts: Mapping[str, nn.Module], config: Config) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)
        self.config = config

    def can_generate(self) -> bool:
        """No: it is never run."""
        return False


@dataclass(frozen=True, slots=True)
class _Builder:
    """Builds a whole model of its parts."""

    parts: Callable[[Config], Mapping[str, nn.Module]]

    def from_config(self, config: Config, dtype: torch.dtype) -> _Whole:
        return _Whole(self.parts(config), config).to(dtype)


def _minicpm(config: Config) -> Mapping[str, nn.Module]:
    llm: Any = AutoModelForCausalLM
    return {
        "vpm": SiglipVisionModel(config.vision_config),
        "resampler": Resampler(config),
        "llm": llm.from_config(config.text_config),
    }


def _save_minicpm(model_type: str, architecture: str) -> Callable[[PreTrainedModel, Path], None]:
    def save(model: PreTrainedModel, out: Path) -> None:
        config: Config = model.config
        vision = config.vision_config
        fields = {
            "architectures": [architecture],
            "model_type": model_type,
            "version": 2.6,
            "drop_vision_last_layer": False,
            "query_num": config.query_num,
            "slice_config": {"max_slice_nums": 9, "patch_size": 14, "scale_resolution": 448},
            "vision_config": {
                **VISION,
                "image_size": vision.image_size,
                "model_type": "siglip",
                "patch_size": vision.patch_size,
            },
            "hidden_size": config.text_config.hidden_size,
        }
        _write(model.state_dict(), out, {**TEXT, **fields})

    return save


def _eagle(config: Any) -> Mapping[str, nn.Module]:  # noqa: ANN401 - fields of two models
    llm: Any = AutoModelForCausalLM
    return {
        "vision_model": SiglipVisionModel(config.vision_config),
        "mlp1": InternVLMultiModalProjector(config),
        "language_model": llm.from_config(config.text_config),
    }


def _save_eagle(model: PreTrainedModel, out: Path) -> None:
    config: Config = model.config
    names = {"layer_norm": "0", "linear_1": "1", "linear_2": "3"}
    weights = {}
    for name, tensor in model.state_dict().items():
        part, _, rest = name.partition(".")
        inner, _, leaf = rest.partition(".")
        own = {"mlp1": f"mlp1.{names.get(inner)}.{leaf}", "vision_model": f"vision_model.vision_model.{rest}"}
        weights[own.get(part, name)] = tensor
    settings = {
        "architectures": ["Eagle2_5_VLForConditionalGeneration"],
        "model_type": "eagle_2_5_vl",
        "downsample_ratio": config.downsample_ratio,
        "select_layer": -1,
        "text_config": {"architectures": ["Qwen2ForCausalLM"], **config.text_config.to_diff_dict()},
        "vision_config": {**_SIGLIP, "image_size": config.vision_config.image_size},
    }
    _write(weights, out, settings)


def _deepseek(config: Config) -> Mapping[str, nn.Module]:
    llm: Any = AutoModelForCausalLM
    return {
        "vision": SiglipVisionModel(config.vision_config),
        "projector": DownsampleProjector(config),
        "language": llm.from_config(config.text_config),
        "image_newline": SingleParameter(config.text_config.hidden_size),
        "view_seperator": SingleParameter(config.text_config.hidden_size),
    }


def _timm(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The names of timm's SigLIP, whose attention has one projection for query, key and value."""
    weights: dict[str, Tensor] = {}
    for name, tensor in state.items():
        for pattern, replacement in _TIMM_NAMES:
            name = re.sub(pattern, replacement, name)  # noqa: PLW2901 - renamed step by step
        weights[name] = tensor[None] if name == "vision.pos_embed" else tensor
    for name in [each for each in weights if ".attn.q_proj." in each]:
        parts = [weights.pop(name.replace(".q_proj.", f".{part}_proj.")) for part in "qkv"]
        weights[name.replace(".q_proj.", ".qkv.")] = torch.cat(parts)
    return weights


def _save_deepseek(model: PreTrainedModel, out: Path) -> None:
    config: Config = model.config
    vision = config.vision_config
    settings = {
        "candidate_resolutions": config.processor["candidate_resolutions"],
        "global_view_pos": "head",
        "language_config": {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", **TEXT},
        "model_type": "deepseek_vl_v2",
        "projector_config": {"model_type": "mlp_projector", **config.projector},
        "tile_tag": "2D",
        "vision_config": {
            "heads": vision.num_attention_heads,
            "image_size": vision.image_size,
            "layers": vision.num_hidden_layers,
            "mlp_ratio": vision.intermediate_size / vision.hidden_size,
            "model_name": "siglip_so400m_patch14_384",
            "model_type": "vision",
            "patch_size": vision.patch_size,
            "width": vision.hidden_size,
        },
    }
    _write(_timm(model.state_dict()), out, settings)


def _write(weights: Mapping[str, Tensor], out: Path, settings: Json) -> None:
    """Weights, those of the language model last, and config.json."""
    ordered = sorted(weights, key=lambda name: name.startswith(("llm.", "language")))
    save_torch_state_dict({name: weights[name].contiguous() for name in ordered}, out, max_shard_size=SHARD)
    write_json(out / "config.json", {**settings, "torch_dtype": "bfloat16"})


_INTERNVL = INTERNVL["internvl_chat"]
_MINICPM = demo_vlm(
    text={**_LLAMA, "hidden_size": 256},
    vision={**_SIGLIP, "image_size": 224},
    image={
        "image_feature_size": 16,
        "image_processor_type": "MiniCPMVImageProcessor",
        "max_slice_nums": 9,
        "norm_mean": [0.5, 0.5, 0.5],
        "norm_std": [0.5, 0.5, 0.5],
        "patch_size": 14,
        "scale_resolution": 448,
    },
    fields={"query_num": 16},
    base="deepseek_vl",
    auto=_Builder(_minicpm),
    save=_save_minicpm("minicpmv", "MiniCPMV"),
)

PUBLISHED: Mapping[str, DemoModel] = {
    "NVLM_D": replace(_INTERNVL, auto=_Nvlm, save=save_internvl("NVLM_D", "NVLM_D_Model")),
    "h2ovl_chat": replace(_INTERNVL, save=save_internvl("h2ovl_chat", "H2OVLChatModel", use_msac=True)),
    "skywork_chat": replace(_INTERNVL, save=save_internvl("skywork_chat", "SkyworkR1VChatModel")),
    "eagle_2_5_vl": demo_vlm(
        text=_LLAMA,
        vision={**_SIGLIP, "image_size": 112},
        image={
            **HALF,
            "image_processor_type": "Eagle2_5_VLImageProcessorFast",
            "max_dynamic_tiles": 6,
            "min_dynamic_tiles": 1,
            "resample": 3,
            "size": {"height": 112, "width": 112},
            "use_thumbnail": True,
        },
        fields={"downsample_ratio": 0.5, "projector_hidden_act": "gelu"},
        base="deepseek_vl",
        auto=_Builder(_eagle),
        save=_save_eagle,
    ),
    "minicpmv": _MINICPM,
    "minicpmo": replace(_MINICPM, save=_save_minicpm("minicpmo", "MiniCPMO")),
    "deepseek_vl_v2": DemoModel(
        config={
            "text_config": _LLAMA,
            "vision_config": {**_SIGLIP, "image_size": 76},
            "processor": {"candidate_resolutions": [[76 * w, 76 * h] for w in (1, 2, 3) for h in (1, 2, 3)]},
            "projector": {
                "depth": 2,
                "downsample_ratio": 2,
                "input_dim": VISION["hidden_size"],
                "mlp_ratio": 1,
                "n_embed": TEXT["hidden_size"],
                "projector_type": "downsample_mlp_gelu",
            },
        },
        files=lambda config: {
            "processor_config.json": {
                **HALF,
                **config.processor,
                "downsample_ratio": 2,
                "normalize": True,
                "patch_size": 14,
                "processor_class": "DeepseekVLV2Processor",
            }
        },
        base="deepseek_vl",
        auto=_Builder(_deepseek),
        save=_save_deepseek,
    ),
}
"""By `model_type`."""
