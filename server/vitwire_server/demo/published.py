"""Models that transformers has no classes for, made of parts under their published names."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from vitwire_server.towers.configs import Config
from vitwire_server.towers.family import Family

Build = Callable[..., Any]
"""Makes a model of its configuration, with weights of `dtype`."""


def of_row(row: Family) -> Build:
    """Builds the modules that a row of the table names, and of the LLM, if there is one, the table of tokens."""

    def build(config: Config, dtype: torch.dtype) -> nn.Module:
        parts = {name: module.make(module.configuration(config)) for name, module in row.modules.items()}
        if "" not in row.tower.prefixes:
            parts["embed_tokens"] = nn.Embedding(512, 64)
        whole: Any = nn.ModuleDict(parts).to(dtype)
        whole.config, whole.can_generate = config, lambda: False
        return whole  # type: ignore[no-any-return]

    return build
