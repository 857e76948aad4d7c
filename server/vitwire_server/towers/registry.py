"""The table of models: one row per `model_type`."""

from collections.abc import Mapping
from types import MappingProxyType

from vitwire_server.towers.family import Family
from vitwire_server.towers.models import (
    deepseek,
    deepseek_ocr,
    deepseek_vl2,
    eagle,
    ernie,
    gemma,
    glm,
    internvl,
    kimi,
    llama,
    llava,
    minicpmv,
    minimax,
    mistral,
    paddleocr,
    qwen,
    siglip,
    step,
)

_MAKERS = (
    qwen,
    glm,
    kimi,
    paddleocr,
    minimax,
    ernie,
    internvl,
    eagle,
    llava,
    gemma,
    deepseek,
    deepseek_vl2,
    deepseek_ocr,
    llama,
    step,
    mistral,
    minicpmv,
    siglip,
)
"""In the order of the tables of models."""

FAMILIES: Mapping[str, Family] = MappingProxyType({row.model_type: row for maker in _MAKERS for row in maker.ROWS})
