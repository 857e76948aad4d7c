"""Demo models in layouts that their authors publish, which transformers has no classes for."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from transformers import AutoModelForImageTextToText, PreTrainedModel

from vitwire_server.demo.demo_model import DemoModel
from vitwire_server.demo.models.tiles import TILES
from vitwire_server.demo.saving import save_internvl
from vitwire_server.towers.configs import Config
from vitwire_server.towers.models.internvl import NvlmProjector


class _Nvlm:
    """Builds InternVL with NVLM-D's projector."""

    @staticmethod
    def from_config(config: Config, dtype: torch.dtype) -> PreTrainedModel:
        model: Any = AutoModelForImageTextToText.from_config(config, dtype=dtype)
        model.model.multi_modal_projector = NvlmProjector(config).to(dtype)
        whole: PreTrainedModel = model
        return whole


_INTERNVL = TILES["internvl_chat"]

PUBLISHED: Mapping[str, DemoModel] = {
    "NVLM_D": replace(_INTERNVL, auto=_Nvlm, save=save_internvl("NVLM_D", "NVLM_D_Model")),
    "h2ovl_chat": replace(_INTERNVL, save=save_internvl("h2ovl_chat", "H2OVLChatModel", use_msac=True)),
}
"""By `model_type`."""
