"""Compass (Cohere): Qwen3-VL's tower."""

from dataclasses import replace

from vitwire_server.towers.family import Family
from vitwire_server.towers.models.qwen import QWEN3_VL

_COMPASS = replace(
    QWEN3_VL,
    model_type="cohere_compass",
    title="Cohere Compass",
    tower=replace(QWEN3_VL.tower, source="cohere_compass.modeling_cohere_compass:CohereCompassVisionModel"),
    transformers="5.23.0",
)

ROWS: tuple[Family, ...] = (_COMPASS,)
