"""Tiny models of tiles in the layouts that their authors publish, where those are not transformers' own."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from torch import Tensor

from vitwire_server.towers.tiny import SHARD, TEXT, VISION, write_json

_ORIGINAL_NAMES = (
    (r"^model\.language_model\.", "language_model.model."),
    (r"^lm_head\.", "language_model.lm_head."),
    (r"^model\.multi_modal_projector\.layer_norm\.", "mlp1.0."),
    (r"^model\.multi_modal_projector\.linear_1\.", "mlp1.1."),
    (r"^model\.multi_modal_projector\.linear_2\.", "mlp1.3."),
    (r"^model\.vision_tower\.", "vision_model."),
    (r"encoder\.layer\.", "encoder.layers."),
    (r"\.lambda_([12])$", r".ls\1"),
    (r"\.attention\.projection_layer\.", ".attn.proj."),
    (r"\.attention\.([qk]_norm)\.", r".attn.\1."),
    (r"\.layernorm_before\.", ".norm1."),
    (r"\.layernorm_after\.", ".norm2."),
    (r"\.cls_token$", ".class_embedding"),
    (r"\.position_embeddings$", ".position_embedding"),
    (r"\.patch_embeddings\.projection\.", ".patch_embedding."),
)


def save_internvl(model: Any, out: Path) -> None:  # noqa: ANN401 - an InternVL model
    """Names, fused projections and config.json as OpenGVLab writes them."""
    weights: dict[str, Tensor] = {}
    fused: dict[str, list[Tensor]] = {}
    for name, tensor in model.state_dict().items():
        for pattern, replacement in _ORIGINAL_NAMES:
            name = re.sub(pattern, replacement, name)  # noqa: PLW2901 - renamed step by step
        if found := re.search(r"\.attention\.[qkv]_proj\.", name):
            fused.setdefault(name.replace(found[0], ".attn.qkv."), []).append(tensor)
        else:
            weights[name] = tensor
    # The state dict of an attention module lists key, query and value in the order of its fields: q, k, v.
    weights |= {name: torch.cat(parts) for name, parts in fused.items()}
    ordered = sorted(weights, key=lambda name: name.startswith("language_model."))
    save_torch_state_dict({name: weights[name].contiguous() for name in ordered}, out, max_shard_size=SHARD)
    vision = model.config.vision_config
    write_json(
        out / "config.json",
        {
            "architectures": ["InternVLChatModel"],
            "model_type": "internvl_chat",
            "downsample_ratio": 0.5,
            "dynamic_image_size": True,
            "force_image_size": vision.image_size[0],
            "max_dynamic_patch": 6,
            "min_dynamic_patch": 1,
            "ps_version": "v2",
            "select_layer": -1,
            "torch_dtype": "bfloat16",
            "use_thumbnail": True,
            "llm_config": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", **TEXT},
            "vision_config": {
                "architectures": ["InternVisionModel"],
                "model_type": "intern_vit_6b",
                **VISION,
                "hidden_act": "gelu",
                "image_size": vision.image_size[0],
                "layer_norm_eps": vision.layer_norm_eps,
                "norm_type": vision.norm_type,
                "patch_size": vision.patch_size[0],
                "qk_normalization": vision.use_qk_norm,
                "qkv_bias": vision.attention_bias,
            },
        },
    )


_STEP3_FIELDS = {"hidden_size": "width", "num_attention_heads": "heads", "num_hidden_layers": "layers"}


def save_step3(model_type: str) -> Callable[[Any, Path], None]:
    """Step-3.7's weights, whose names are those of the hub anyway, and config.json in the words of an earlier model."""

    def save(model: Any, out: Path) -> None:  # noqa: ANN401 - a Step-3.7 model
        model.save_pretrained(out, max_shard_size=SHARD)
        settings = json.loads((out / "config.json").read_text(encoding="utf-8"))
        vision = {_STEP3_FIELDS.get(name, name): value for name, value in settings["vision_config"].items()}
        vision["ls_init_value"] = vision.pop("layer_scale_init_value")
        vision["model_type"] = "perception_encoder"
        write_json(out / "config.json", {**settings, "model_type": model_type, "vision_config": vision})

    return save
