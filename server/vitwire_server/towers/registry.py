"""The table of models: one row per `model_type`."""

from collections.abc import Mapping
from types import MappingProxyType

from vitwire_server.towers.family import Family
from vitwire_server.towers.models import (
    deepseek,
    deepseek_ocr,
    ernie,
    gemma,
    glm,
    granite_docling,
    idefics,
    idefics2,
    internvl,
    kimi,
    liquid,
    llama,
    llava,
    minimax,
    mistral,
    paddleocr,
    qwen,
    siglip,
    step,
    videollama,
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
    idefics,
    idefics2,
    liquid,
    videollama,
    granite_docling,
)
"""In the order of the tables of models."""

FAMILIES: Mapping[str, Family] = MappingProxyType({row.model_type: row for maker in _MAKERS for row in maker.ROWS})
