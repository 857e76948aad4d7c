"""The table of models: one row per `model_type`."""

from collections.abc import Mapping
from types import MappingProxyType

from vitwire_server.towers.family import Family
from vitwire_server.towers.models import (
    aria,
    deepseek,
    deepseek_ocr,
    ernie,
    florence,
    gemma,
    glm,
    internvl,
    kimi,
    llama,
    llava,
    minimax,
    mistral,
    ovis,
    paddleocr,
    phi,
    pix2struct,
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
    llava,
    gemma,
    deepseek,
    deepseek_ocr,
    llama,
    ovis,
    phi,
    step,
    mistral,
    aria,
    florence,
    pix2struct,
    siglip,
)
"""In the order of the tables of models."""

FAMILIES: Mapping[str, Family] = MappingProxyType({row.model_type: row for maker in _MAKERS for row in maker.ROWS})
