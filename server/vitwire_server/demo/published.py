"""Models that transformers has no classes for: how they are built, and their authors' names of weights."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForImageTextToText
from transformers.models.internvl.configuration_internvl import InternVLConfig

from vitwire_server.towers.configs import Config
from vitwire_server.towers.family import Family
from vitwire_server.towers.models.internvl import NvlmProjector

Build = Callable[..., Any]
"""Makes a model of its configuration, with weights of `dtype`."""


def nvlm(config: InternVLConfig, dtype: torch.dtype) -> nn.Module:
    model: Any = AutoModelForImageTextToText.from_config(config, dtype=dtype)
    model.model.multi_modal_projector = NvlmProjector(config).to(dtype)
    return model  # type: ignore[no-any-return]


def of_row(row: Family, config: Config, dtype: torch.dtype) -> nn.Module:
    """The modules of an entry of the table by their names there, and one layer in place of a language model."""
    parts = {name: module.make(module.configuration(config)) for name, module in row.modules.items()}
    whole: Any = nn.ModuleDict({**parts, "llm": nn.Linear(512, 256)}).to(dtype)
    whole.config, whole.can_generate = config, lambda: False
    return whole  # type: ignore[no-any-return]


EAGLE_NAMES = (
    (r"^tower\.", "vision_model.vision_model."),
    (r"^projector\.layer_norm\.", "mlp1.0."),
    (r"^projector\.linear_1\.", "mlp1.1."),
    (r"^projector\.linear_2\.", "mlp1.3."),
)
TIMM_NAMES = (
    (r"^tower\.", "vision."),
    (r"^vision\.embeddings\.patch_embedding\.", "vision.patch_embed.proj."),
    (r"^vision\.embeddings\.position_embedding\.weight$", "vision.pos_embed"),
    (r"^vision\.post_layernorm\.", "vision.norm."),
    (r"^vision\.encoder\.layers\.", "vision.blocks."),
    (r"^(vision\..*)\.layer_norm([12])\.", r"\1.norm\2."),
    (r"^(vision\..*)\.self_attn\.out_proj\.", r"\1.attn.proj."),
    (r"^(vision\..*)\.self_attn\.", r"\1.attn."),
)
DOTS_NAMES = (
    (r"^tower\.", "vision_tower."),
    (r"\.patch_embed\.", ".patch_embed.patchifier."),
    (r"^vision_tower\.norm\.", "vision_tower.post_trunk_norm."),
    (r"\.gate_proj\.", ".fc1."),
    (r"\.down_proj\.", ".fc2."),
    (r"\.up_proj\.", ".fc3."),
)
