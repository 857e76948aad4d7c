"""Models that transformers has no classes for, made of parts under their published names."""

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


def of_row(row: Family) -> Build:
    """Builds the modules that a row of the table names, beside a table of tokens: no LLM."""

    def build(config: Config, dtype: torch.dtype) -> nn.Module:
        parts = {name: module.make(module.configuration(config)) for name, module in row.modules.items()}
        whole: Any = nn.ModuleDict({**parts, "embed_tokens": nn.Embedding(512, 64)}).to(dtype)
        whole.config, whole.can_generate = config, lambda: False
        return whole  # type: ignore[no-any-return]

    return build
