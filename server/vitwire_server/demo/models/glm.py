"""Demo models of GLM (Z.ai)."""

from collections.abc import Mapping

from vitwire_server.demo.demo_model import DemoModel, Json
from vitwire_server.demo.models.packed_parts import MARKED, ROPE, ROTARY_TEXT, ROUTED, TOWER, packed_demo, whole

_TEXT = {**ROTARY_TEXT, "rope_parameters": {**ROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}}
_GLM5_TEXT: Json = {
    **_TEXT,
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

_TOWER = {**TOWER, "image_size": 112}
_NAMED_TOWER: Json = {"model_type": "glm4v_vision", **_TOWER}
_GLM5_TOWER: Json = {**TOWER, "projection_intermediate_size": 96}

_GLM4 = ("Glm4vImageProcessor", "Glm4vVideoProcessor")
_GLM46 = ("Glm46VImageProcessor", "Glm46VVideoProcessor")

GLM: Mapping[str, DemoModel] = {
    "glm4v": packed_demo("glm4v", whole(_TEXT, _TOWER, MARKED), _GLM4),
    "glm46v": packed_demo("glm46v", whole(_TEXT, _NAMED_TOWER, MARKED), _GLM46),
    "glm4v_moe": packed_demo("glm4v_moe", whole({**_TEXT, **ROUTED}, _TOWER, MARKED), _GLM4),
    "glm_ocr": packed_demo("glm_ocr", whole(_TEXT, _TOWER, MARKED), _GLM46),
    "glm5_next": packed_demo(
        "glm5_next",
        whole(_GLM5_TEXT, _GLM5_TOWER, MARKED),
        ("Glm5NextImageProcessor", "Glm5NextVideoProcessor"),
    ),
    "glmga": packed_demo("glmga", whole(_TEXT, _NAMED_TOWER, MARKED), ("GlmgaImageProcessor", "GlmgaVideoProcessor")),
}
"""By `model_type`."""
