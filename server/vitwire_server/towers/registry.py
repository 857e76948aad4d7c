"""The table of models: one row per `model_type`."""

from collections.abc import Mapping
from types import MappingProxyType

from vitwire_server.towers.family import Family
from vitwire_server.towers.models import (
    aimv2,
    clip,
    deepseek,
    deepseek_ocr,
    dino,
    ernie,
    gemma,
    glm,
    internvl,
    kimi,
    llama,
    llava,
    minimax,
    mistral,
    paddleocr,
    qwen,
    siglip,
    step,
    vit,
)

_MAKERS = (
    qwen,
    glm,
    kimi,
    paddleocr,
    minimax,
    ernie,
    internvl,
    llava,
    gemma,
    deepseek,
    deepseek_ocr,
    llama,
    step,
    mistral,
    siglip,
    clip,
    dino,
    vit,
    aimv2,
)
"""In the order of the tables of models."""

FAMILIES: Mapping[str, Family] = MappingProxyType({row.model_type: row for maker in _MAKERS for row in maker.ROWS})
