"""HyperCLOVA X (NAVER): Qwen2.5-VL's tower and a linear projector."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

from vitwire_server.towers.configs import Config
from vitwire_server.towers.family import in_model
from vitwire_server.towers.layouts.heads import ProjectedTokens
from vitwire_server.towers.models.qwen import QWEN2_5_VL
from vitwire_server.towers.shared.parts import linear, projector, variant

_TOWERS = ("qwen2_5_vl", "qwen2_5_vl_vision")


def _config(_: Path, settings: Mapping[str, Any]) -> Config:
    """NAVER's config.json says `vlm`, and has the whole Qwen2.5-VL's name where the tower's belongs.

    Raises ValueError over another tower or projector.
    """
    from transformers import HyperCLOVAXVisionV2Config  # noqa: PLC0415 - older releases lack it

    tower, kind = settings["vision_config"].get("model_type"), settings.get("mm_projector_type", "linear")
    if tower not in _TOWERS:
        raise ValueError(f"vision_config.model_type is {tower!r}, only Qwen2.5-VL's is served")
    if kind != "linear":
        raise ValueError(f"mm_projector_type is {kind!r}, but must be 'linear'")
    config: Config = HyperCLOVAXVisionV2Config.from_dict(deepcopy(dict(settings)))
    return config


_HYPERCLOVA = variant(
    QWEN2_5_VL,
    "hyperclovax_vision_v2",
    "HyperCLOVA X SEED Think",
    configuration=_config,
    tower=replace(QWEN2_5_VL.tower, prefixes=in_model("vision_model.")),
    beside=projector(
        linear(lambda config: (config.vision_config.out_hidden_size, config.text_config.hidden_size)),
        in_model("projector.", "vision_projector."),
    ),
    head=ProjectedTokens,
    width="text_config.hidden_size",
    transformers="5.23.0",
)

ROWS = (_HYPERCLOVA, replace(_HYPERCLOVA, model_type="vlm"))
