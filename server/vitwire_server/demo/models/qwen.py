"""Demo models whose towers are Qwen's, in Qwen's language models and in those of other makers."""

import json
from collections.abc import Mapping
from pathlib import Path

from transformers import AutoModelForMultimodalLM, AutoModelForPreTraining, PreTrainedModel

from vitwire_server.demo.demo_model import DemoModel, Json, save_plain, write_json
from vitwire_server.demo.models.packed_parts import (
    EXPERTS,
    HYBRID,
    INDEXED,
    LAYERS,
    QWEN2_5_TOWER,
    QWEN2_PROCESSORS,
    QWEN3_5_TOWER,
    QWEN3_PROCESSORS,
    QWEN3_TEXT,
    QWEN3_TOWER,
    ROTARY_TEXT,
    TOKENS,
    packed_demo,
    whole,
)
from vitwire_server.demo.saving import save_qwen2_5_omni

_STARTS = {"vision_start_token_id": 502, "vision_end_token_id": 503, "audio_start_token_id": 507}
_AUDIO = {
    "num_mel_bins": 8,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "d_model": 32,
    "n_window": 4,
    "output_dim": 64,
    "downsample_hidden_size": 8,
}
_THINKER_2_5 = whole(ROTARY_TEXT, QWEN2_5_TOWER, {**INDEXED, **_STARTS, "audio_config": _AUDIO})
_THINKER_3 = whole({**QWEN3_TEXT, **EXPERTS}, QWEN3_TOWER, {**TOKENS, "audio_config": _AUDIO})

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

_EDGE_TOWER: Json = {**LAYERS, "num_patches": 64}

_QWEN2_VL = whole(ROTARY_TEXT, {"depth": 4, "embed_dim": 64, "hidden_size": 64, "num_heads": 4, "mlp_ratio": 2})
_HYPERCLOVA: Json = whole({**QWEN3_TEXT, "model_type": "hyperclovax"}, QWEN2_5_TOWER)


def _save_vlm(model: PreTrainedModel, out: Path) -> None:
    """With NAVER's names of the types in config.json; those of the weights are transformers' too."""
    save_plain(model, out)
    settings = json.loads((out / "config.json").read_text(encoding="utf-8"))
    vision = {**settings["vision_config"], "model_type": "qwen2_5_vl"}
    write_json(out / "config.json", {**settings, "model_type": "vlm", "vision_config": vision})


QWEN: Mapping[str, DemoModel] = {
    "qwen2_vl": packed_demo("qwen2_vl", _QWEN2_VL),
    "qwen2_5_vl": packed_demo("qwen2_5_vl", whole(ROTARY_TEXT, QWEN2_5_TOWER)),
    "qwen3_vl": packed_demo("qwen3_vl", whole(QWEN3_TEXT, QWEN3_TOWER), QWEN3_PROCESSORS),
    "qwen3_vl_moe": packed_demo("qwen3_vl_moe", whole({**QWEN3_TEXT, **EXPERTS}, QWEN3_TOWER), QWEN3_PROCESSORS),
    "qwen3_5": packed_demo("qwen3_5", whole({**QWEN3_TEXT, **HYBRID}, QWEN3_5_TOWER), QWEN3_PROCESSORS),
    "qwen3_5_moe": packed_demo(
        "qwen3_5_moe", whole({**QWEN3_TEXT, **HYBRID, **EXPERTS}, QWEN3_5_TOWER), QWEN3_PROCESSORS
    ),
    "qwen4_exp": packed_demo("qwen4_exp", whole(_QWEN4_TEXT, QWEN3_5_TOWER), QWEN3_PROCESSORS),
    "qwen2_5_omni": packed_demo(
        "qwen2_5_omni",
        {"thinker_config": _THINKER_2_5, "enable_audio_output": False},
        auto=AutoModelForMultimodalLM,
        save=save_qwen2_5_omni,
    ),
    "qwen2_5_omni_thinker": packed_demo("qwen2_5_omni_thinker", _THINKER_2_5),
    "qwen3_omni_moe": packed_demo(
        "qwen3_omni_moe",
        {"thinker_config": _THINKER_3, "enable_audio_output": False},
        auto=AutoModelForMultimodalLM,
    ),
    "qwen3_omni_moe_thinker": packed_demo("qwen3_omni_moe_thinker", _THINKER_3),
    "colqwen2": packed_demo(
        "colqwen2",
        {"vlm_config": {"model_type": "qwen2_vl", **_QWEN2_VL}, "embedding_dim": 16},
        (QWEN2_PROCESSORS[0], None),
        auto=AutoModelForPreTraining,
    ),
    "cosmos3_omni": packed_demo("cosmos3_omni", whole(QWEN3_TEXT, QWEN3_TOWER), QWEN3_PROCESSORS),
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
    "hyperclovax_vision_v2": packed_demo("hyperclovax_vision_v2", _HYPERCLOVA),
    "vlm": packed_demo("vlm", _HYPERCLOVA, base="hyperclovax_vision_v2", save=_save_vlm),
}
"""By `model_type`. Omni models are whole only with their talkers, even if those are switched off."""
