"""Demo models whose towers are those of Qwen, in language models of other makers or of a newer generation."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from transformers import AutoModelForPreTraining, PreTrainedModel

from vitwire_server.demo.demo_model import TEXT, DemoModel, Json, save_plain, write_json
from vitwire_server.demo.models.packed import (
    EXPERTS,
    GLM_TEXT,
    HYBRID,
    LAYERS,
    MARKED,
    PACKED,
    QWEN2_5_TOWER,
    QWEN3_5_TOWER,
    QWEN3_TEXT,
    QWEN3_TOWER,
    ROUTED,
    TOKENS,
    TOWER,
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

_GLM5_TEXT: Json = {
    **GLM_TEXT,
    **ROUTED,
    "num_key_value_heads": 4,
    "hc_mult": 2,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "index_topk": 64,
    "index_kpool": 4,
    "kv_lora_rank": 32,
    "layer_types": ["linear_attention", "linear_attention", "indexed_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
_GLM5_TOWER: Json = {**TOWER, "projection_intermediate_size": 96}

_LFM3_TEXT: Json = {
    "model_type": "lfm3",
    **TEXT,
    "pad_token_id": 0,
    "head_dim": 16,
    "layer_types": ["conv", "sliding_attention", "full_attention"],
}
_LFM3_TOWER: Json = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "layer_types": ["conv", "full_attention", "conv", "full_attention"],
}
_LFM3: Json = {**TOKENS, "projector_hidden_size": 96}

_EDGE_TOWER: Json = {**LAYERS, "num_patches": 64}

_HYPERCLOVA: Json = whole({**QWEN3_TEXT, "model_type": "hyperclovax"}, QWEN2_5_TOWER)


def _save_vlm(model: PreTrainedModel, out: Path) -> None:
    """With NAVER's names of the types in config.json; those of the weights are transformers' too."""
    save_plain(model, out)
    settings = json.loads((out / "config.json").read_text(encoding="utf-8"))
    vision = {**settings["vision_config"], "model_type": "qwen2_5_vl"}
    write_json(out / "config.json", {**settings, "model_type": "vlm", "vision_config": vision})


PACKED_NEWER: Mapping[str, DemoModel] = MappingProxyType(
    {
        "qwen4_exp": packed_demo("qwen4_exp", whole(_QWEN4_TEXT, QWEN3_5_TOWER), _QWEN3_VL),
        "cosmos3_omni": packed_demo("cosmos3_omni", whole(QWEN3_TEXT, QWEN3_TOWER), _QWEN3_VL),
        "cosmos3_edge": packed_demo(
            "cosmos3_edge",
            whole(QWEN3_TEXT, _EDGE_TOWER, {**TOKENS, "projector_hidden_size": 96}),
            ("Cosmos3EdgeImageProcessor", "Cosmos3EdgeVideoProcessor"),
        ),
        "cohere_compass": packed_demo(
            "cohere_compass",
            whole(_COMPASS_TEXT, QWEN3_TOWER),
            ("CohereCompassImageProcessor", "CohereCompassVideoProcessor"),
        ),
        "glm5_next": packed_demo(
            "glm5_next",
            whole(_GLM5_TEXT, _GLM5_TOWER, MARKED),
            ("Glm5NextImageProcessor", "Glm5NextVideoProcessor"),
        ),
        "glmga": packed_demo(
            "glmga",
            whole(GLM_TEXT, {"model_type": "glm4v_vision", **PACKED["glm46v"].config["vision_config"]}, MARKED),
            ("GlmgaImageProcessor", "GlmgaVideoProcessor"),
        ),
        "colqwen2": packed_demo(
            "colqwen2",
            {"vlm_config": {"model_type": "qwen2_vl", **PACKED["qwen2_vl"].config}, "embedding_dim": 16},
            ("Qwen2VLImageProcessor", None),
            auto=AutoModelForPreTraining,
        ),
        "lfm3_vl": packed_demo("lfm3_vl", whole(_LFM3_TEXT, _LFM3_TOWER, _LFM3), _QWEN3_VL),
        "hyperclovax_vision_v2": packed_demo("hyperclovax_vision_v2", _HYPERCLOVA),
        "vlm": packed_demo("vlm", _HYPERCLOVA, base="hyperclovax_vision_v2", save=_save_vlm),
    }
)
