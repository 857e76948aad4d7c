"""The table of models: one row per `model_type`."""

from collections.abc import Mapping
from types import MappingProxyType

from vitwire_server.towers.family import Family
from vitwire_server.towers.models import (
    cohere_compass,
    cosmos,
    deepseek,
    deepseek_ocr,
    deepseek_vl2,
    ernie,
    gemma,
    glm,
    hyperclova,
    idefics,
    internvl,
    kimi,
    lfm3,
    liquid,
    llama,
    llava,
    minicpm,
    minimax,
    mistral,
    muse,
    ovis,
    paddleocr,
    qianfan,
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
    deepseek_vl2,
    deepseek_ocr,
    llama,
    ovis,
    step,
    mistral,
    minicpm,
    siglip,
    idefics,
    liquid,
    cosmos,
    cohere_compass,
    hyperclova,
    qianfan,
    lfm3,
    muse,
)
"""In the order of the tables of models."""

FAMILIES: Mapping[str, Family] = MappingProxyType({row.model_type: row for maker in _MAKERS for row in maker.ROWS})
