"""The table of models: one row per `model_type`."""

from collections.abc import Mapping
from types import MappingProxyType

from vitwire_server.towers.family import Family
from vitwire_server.towers.models import (
    cohere_compass,
    cosmos,
    deepseek,
    deepseek_ocr,
    ernie,
    gemma,
    glm,
    hunyuan,
    hyperclova,
    internvl,
    kimi,
    lfm3,
    llama,
    llava,
    minicpm,
    minimax,
    mistral,
    muse,
    nemotron,
    paddleocr,
    qianfan,
    qwen,
    siglip,
    step,
    unlimited_ocr,
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
    cosmos,
    cohere_compass,
    hyperclova,
    qianfan,
    lfm3,
    muse,
    minicpm,
    nemotron,
    unlimited_ocr,
    hunyuan,
)
"""In the order of the tables of models."""

FAMILIES: Mapping[str, Family] = MappingProxyType({row.model_type: row for maker in _MAKERS for row in maker.ROWS})
