"""Published config.json files of layouts without classes in transformers: the sizes that follow from them.

Of each, the fields that are read; names are those on huggingface.co.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from vitwire_server.towers.checkpoints.checkpoint import open_checkpoint

_SO400M = {"hidden_size": 1152, "intermediate_size": 4304, "num_attention_heads": 16, "num_hidden_layers": 27}
_SAM_B = {"heads": 12, "layers": 12, "width": 768}
_MINICPM = {
    "query_num": 64,
    "drop_vision_last_layer": False,
    "torch_dtype": "bfloat16",
    "vision_config": {**_SO400M, "image_size": 980, "model_type": "siglip", "patch_size": 14},
}
_INTERN = {
    "downsample_ratio": 0.5,
    "dynamic_image_size": True,
    "force_image_size": 448,
    "max_dynamic_patch": 6,
    "min_dynamic_patch": 1,
    "ps_version": "v2",
    "select_layer": -1,
    "torch_dtype": "bfloat16",
    "use_thumbnail": True,
}


def _vision(width: int, hidden: int, *, heads: int, layers: int, norms_queries: bool) -> dict[str, Any]:
    """An InternViT, of the larger kind if it normalises queries and keys."""
    own = {"hidden_size": width, "intermediate_size": hidden, "num_attention_heads": heads, "num_hidden_layers": layers}
    norm = "rms_norm" if norms_queries else "layer_norm"
    kind = {"norm_type": norm, "qk_normalization": norms_queries, "qkv_bias": not norms_queries}
    return {**own, **kind, "image_size": 448, "patch_size": 14}


CONFIGS: dict[str, dict[str, Any]] = {
    "nvidia/NVLM-D-72B": {
        **_INTERN,
        "model_type": "NVLM_D",
        "llm_config": {"hidden_size": 8192, "intermediate_size": 29568},
        "vision_config": _vision(3200, 12800, heads=25, layers=45, norms_queries=True),
    },
    "h2oai/h2ovl-mississippi-2b": {
        **_INTERN,
        "model_type": "h2ovl_chat",
        "use_msac": True,
        "llm_config": {"hidden_size": 2560, "intermediate_size": 6912},
        "vision_config": _vision(1024, 4096, heads=16, layers=24, norms_queries=False),
    },
    "openbmb/MiniCPM-V-2_6": {**_MINICPM, "model_type": "minicpmv", "version": 2.6, "hidden_size": 3584},
    "openbmb/MiniCPM-V-4": {**_MINICPM, "model_type": "minicpmv", "version": 4.0, "hidden_size": 2560},
    "openbmb/MiniCPM-V-4_5": {**_MINICPM, "model_type": "minicpmv", "version": 4.5, "hidden_size": 4096},
    "deepseek-ai/deepseek-vl2-tiny": {
        "model_type": "deepseek_vl_v2",
        "candidate_resolutions": [[384, 384], [384, 768], [768, 384], [768, 768]],
        "projector_config": {"model_type": "mlp_projector", "n_embed": 1280},
        "torch_dtype": "bfloat16",
        "vision_config": {
            "layers": 27,
            "mlp_ratio": 3.7362,
            "model_name": "siglip_so400m_patch14_384",
            "model_type": "vision",
            "patch_size": 14,
            "width": 1152,
        },
    },
    "deepseek-ai/DeepSeek-OCR": {
        "model_type": "deepseek_vl_v2",
        "projector_config": {"input_dim": 2048, "n_embed": 1280, "projector_type": "linear"},
        "torch_dtype": "bfloat16",
        "vision_config": {
            "image_size": 1024,
            "mlp_ratio": 3.7362,
            "model_name": "deeplip_b_l",
            "model_type": "vision",
            "width": {
                "clip-l-14-224": {"heads": 16, "image_size": 224, "layers": 24, "patch_size": 14, "width": 1024},
                "sam_vit_b": {**_SAM_B, "downsample_channels": [512, 1024], "global_attn_indexes": [2, 5, 8, 11]},
            },
        },
    },
    "nvidia/Eagle2.5-8B": {
        "model_type": "eagle_2_5_vl",
        "downsample_ratio": 0.5,
        "select_layer": -1,
        "text_config": {"architectures": ["Qwen2ForCausalLM"], "hidden_size": 3584},
        "torch_dtype": "bfloat16",
        "vision_config": {**_SO400M, "image_size": 448, "model_type": "siglip_vision_model", "patch_size": 14},
    },
}
CONFIGS["inclusionAI/Ling-3.0-flash-VL"] = {
    "model_type": "bailing_moe_v3_vl",
    "text_config": {"hidden_size": 2560},
    "torch_dtype": "bfloat16",
    "vision_config": {"depth": 27, "hidden_size": 1152, "model_type": "qwen3_moe_vit", "out_hidden_size": 4096},
}
CONFIGS["internlm/Intern-S1-Pro"] = {
    "model_type": "interns1_pro",
    "text_config": {"dtype": "bfloat16", "hidden_size": 4096, "model_type": "interns1_pro_text"},
    "vision_config": {"depth": 24, "hidden_size": 1024, "model_type": "interns1_pro_vision", "out_hidden_size": 4096},
}
CONFIGS["moondream/moondream3-preview"] = {"model_type": "moondream3", "config": {}, "dtype": "bfloat16"}
WEIGHTS = {
    "moondream/moondream3-preview": {
        "projector 0.weight": (8192, 2304),
        "projector 2.weight": (2048, 8192),
        "start weight": (1, 2048),
        "tower embeddings.position_embedding.weight": (729, 1152),
        "tower encoder.layers.26.mlp.fc1.weight": (4304, 1152),
    },
    "internlm/Intern-S1-Pro": {"tower merger.linear_fc2.weight": (4096, 4096)},
    "inclusionAI/Ling-3.0-flash-VL": {
        "tower merger.linear_fc1.weight": (2560, 4608),
        "tower merger.linear_fc2.weight": (2560, 2560),
    },
    "nvidia/NVLM-D-72B": {
        "projector linear_1.weight": (29568, 12800),
        "projector linear_2.weight": (8192, 29568),
        "tower encoder.layer.44.attention.q_norm.weight": (3200,),
    },
    "h2oai/h2ovl-mississippi-2b": {
        "projector linear_1.weight": (2560, 4096),
        "projector linear_2.bias": (2560,),
        "tower embeddings.position_embeddings": (1, 1025, 1024),
    },
    "openbmb/MiniCPM-V-2_6": {
        "resampler attn.in_proj_weight": (10752, 3584),
        "resampler kv_proj.weight": (3584, 1152),
        "resampler query": (64, 3584),
        "tower embeddings.position_embedding.weight": (4900, 1152),
    },
    "openbmb/MiniCPM-V-4": {"resampler proj": (2560, 2560)},
    "openbmb/MiniCPM-V-4_5": {"resampler proj": (4096, 4096)},
    "deepseek-ai/deepseek-vl2-tiny": {
        "projector layers.0.weight": (1280, 4608),
        "projector layers.2.weight": (1280, 1280),
        "tower embeddings.position_embedding.weight": (729, 1152),
        "tower encoder.layers.26.mlp.fc1.weight": (4304, 1152),
    },
    "deepseek-ai/DeepSeek-OCR": {
        "projector weight": (1280, 2048),
        "tower sam_encoder.neck.conv1.weight": (256, 768, 1, 1),
        "tower vision_encoder.encoder.layers.23.mlp.fc1.weight": (4096, 1024),
    },
    "nvidia/Eagle2.5-8B": {
        "projector linear_1.weight": (3584, 4608),
        "tower embeddings.position_embedding.weight": (1024, 1152),
    },
}
TOKENS = {"nvidia/NVLM-D-72B": 256, "deepseek-ai/deepseek-vl2-tiny": 196, "nvidia/Eagle2.5-8B": 256}
TOKENS |= {"deepseek-ai/DeepSeek-OCR": 257}
"""Of a tile."""


@pytest.mark.parametrize("name", CONFIGS)
def test_a_published_configuration_asks_for_the_published_weights(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    checkpoint = open_checkpoint(str(tmp_path))
    assert checkpoint.dtype == torch.bfloat16
    with torch.device("meta"):
        parts = {
            part: module.make(module.configuration(checkpoint.config))
            for part, module in checkpoint.family.modules.items()
        }
    shapes = {f"{part} {key}": tuple(own.shape) for part in parts for key, own in parts[part].named_parameters()}
    for weight, shape in WEIGHTS[name].items():
        assert shapes[weight] == shape, weight
    tower = checkpoint.family.build(parts, checkpoint.config)
    assert tower.geometry.width == CONFIGS[name].get("hidden_size", tower.geometry.width)
    if name in TOKENS:
        assert tower.samples(1, 1)[0].t * TOKENS[name] == tower.footprint(tower.samples(1, 1)[0]).rows
