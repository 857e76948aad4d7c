"""HyperCLOVA X (NAVER): Qwen2.5-VL's tower and a linear projector."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from vitwire_server.towers.configs import Config
from vitwire_server.towers.family import Family, Module, in_model
from vitwire_server.towers.layouts.heads import ProjectedTokens
from vitwire_server.towers.layouts.packed import PackedFamily
from vitwire_server.towers.models.qwen import QWEN2_5_VL

_TOWERS = ("qwen2_5_vl", "qwen2_5_vl_vision")


class Projector(nn.Linear):
    """The projector, which transformers keeps as a bare layer of the whole model."""

    def __init__(self, config: Config) -> None:
        super().__init__(config.vision_config.out_hidden_size, config.text_config.hidden_size)


@dataclass(frozen=True, kw_only=True)
class HyperclovaFamily(PackedFamily):
    """NAVER's config.json says `vlm`, and has the whole Qwen2.5-VL's name where the tower's belongs."""

    def read_config(self, folder: Path, settings: Mapping[str, Any]) -> Config:
        """See Family. Raises ValueError over another tower or projector."""
        del folder
        from transformers import HyperCLOVAXVisionV2Config  # noqa: PLC0415 - older releases lack it

        tower, projector = settings["vision_config"].get("model_type"), settings.get("mm_projector_type", "linear")
        if tower not in _TOWERS:
            raise ValueError(f"vision_config.model_type is {tower!r}, only Qwen2.5-VL's is served")
        if projector != "linear":
            raise ValueError(f"mm_projector_type is {projector!r}, but must be 'linear'")
        config: Config = HyperCLOVAXVisionV2Config.from_dict(deepcopy(dict(settings)))
        return config


_HYPERCLOVA = HyperclovaFamily(
    model_type="hyperclovax_vision_v2",
    title="HyperCLOVA X SEED Think",
    tower=replace(QWEN2_5_VL.tower, prefixes=in_model("vision_model.")),
    beside={
        "projector": Module(
            source=f"{__name__}:Projector", prefixes=in_model("projector.", "vision_projector."), config=""
        )
    },
    head=ProjectedTokens,
    width="text_config.hidden_size",
    span=QWEN2_5_VL.span,
    architecture=QWEN2_5_VL.architecture,
    attention=QWEN2_5_VL.attention,
    special="projector",
    transformers="5.23.0",
)

_PUBLISHED = replace(_HYPERCLOVA, model_type="vlm", special="NAVER's own config.json; projector")

ROWS: tuple[Family, ...] = (_HYPERCLOVA, _PUBLISHED)
