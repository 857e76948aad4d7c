"""Demo models in layouts that their authors publish, which transformers has no classes for."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.models.siglip.modeling_siglip import SiglipVisionModel

from vitwire_server.demo.demo_model import SHARD, TEXT, VISION, DemoModel, Json, demo_vlm, write_json
from vitwire_server.demo.models.tiles import TILES
from vitwire_server.demo.saving import save_internvl
from vitwire_server.towers.configs import Config
from vitwire_server.towers.models.internvl import NvlmProjector
from vitwire_server.towers.shared.resampler import Resampler

_LLAMA = {"model_type": "llama", **TEXT}
_SIGLIP = {"model_type": "siglip_vision_model", **VISION, "patch_size": 14, "vision_use_head": False}


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
        _save(model, out, {**TEXT, **fields})

    return save


def _save(model: nn.Module, out: Path, settings: Json) -> None:
    """Weights under their own names, those of the language model last, and config.json."""
    weights = model.state_dict()
    ordered = sorted(weights, key=lambda name: name.startswith(("llm.", "language.")))
    save_torch_state_dict({name: weights[name].contiguous() for name in ordered}, out, max_shard_size=SHARD)
    write_json(out / "config.json", {**settings, "torch_dtype": "bfloat16"})


_INTERNVL = TILES["internvl_chat"]
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
    "minicpmv": _MINICPM,
    "minicpmo": replace(_MINICPM, save=_save_minicpm("minicpmo", "MiniCPMO")),
}
"""By `model_type`."""
