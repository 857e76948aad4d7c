"""Demo models whose towers are those of Qwen, in language models of other makers or of a newer generation."""

from collections.abc import Mapping
from types import MappingProxyType

from vitwire_server.demo.demo_model import DemoModel, Json
from vitwire_server.demo.models.packed import (
    EXPERTS,
    HYBRID,
    QWEN2_5_TOWER,
    QWEN3_5_TOWER,
    QWEN3_TEXT,
    QWEN3_TOWER,
    packed_demo,
    whole,
)

_QWEN3_VL = ("Qwen2VLImageProcessor", "Qwen3VLVideoProcessor")
_INDEXER = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 64,
    "indexer_compress_ratio": 4,
}
_QWEN4_TEXT: Json = {
    **QWEN3_TEXT,
    **HYBRID,
    **EXPERTS,
    **_INDEXER,
    "hc_lowrank": 8,
    "layer_types": ["linear_attention", "linear_attention", "indexed_attention"],
}
_COMPASS_TEXT: Json = {
    **QWEN3_TEXT,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "rope_parameters": dict.fromkeys(("sliding_attention", "full_attention"), QWEN3_TEXT["rope_parameters"]),
}

PACKED_NEWER: Mapping[str, DemoModel] = MappingProxyType(
    {
        "qwen4_exp": packed_demo("qwen4_exp", whole(_QWEN4_TEXT, QWEN3_5_TOWER), _QWEN3_VL),
        "cosmos3_omni": packed_demo("cosmos3_omni", whole(QWEN3_TEXT, QWEN3_TOWER), _QWEN3_VL),
        "cohere_compass": packed_demo(
            "cohere_compass",
            whole(_COMPASS_TEXT, QWEN3_TOWER),
            ("CohereCompassImageProcessor", "CohereCompassVideoProcessor"),
        ),
        "hyperclovax_vision_v2": packed_demo(
            "hyperclovax_vision_v2", whole({**QWEN3_TEXT, "model_type": "hyperclovax"}, QWEN2_5_TOWER)
        ),
    }
)
