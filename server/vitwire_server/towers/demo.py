"""Tiny whole VLMs in hub layout: random weights of a fixed seed, for demos and tests."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, GenerationConfig

from vitwire_server.towers.families import FAMILIES

_CLIP = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
_HALF = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
_TEXT = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]},
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_QWEN3_TEXT = {**_TEXT, "head_dim": 16}
_QWEN3_VISION = {
    "depth": 4,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_heads": 4,
    "out_hidden_size": 64,
    "num_position_embeddings": 256,
    "deepstack_visual_indexes": [1, 2],
}
_TINY: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any], Mapping[str, Any]]] = {
    "qwen2_vl": (
        _TEXT,
        {"depth": 4, "embed_dim": 64, "hidden_size": 64, "num_heads": 4, "mlp_ratio": 2},
        _CLIP,
    ),
    "qwen2_5_vl": (
        _TEXT,
        {
            "depth": 4,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_heads": 4,
            "out_hidden_size": 64,
            "fullatt_block_indexes": [1, 3],
        },
        _CLIP,
    ),
    "qwen3_vl": (_QWEN3_TEXT, _QWEN3_VISION, _HALF),
    "qwen3_vl_moe": ({**_QWEN3_TEXT, **_EXPERTS}, _QWEN3_VISION, _HALF),
}
_TOKENS = {
    "image_token_id": 500,
    "video_token_id": 501,
    "vision_start_token_id": 502,
    "vision_end_token_id": 503,
}
_IMAGE_TOKENS = (16, 1280)
"""Bounds of an image's tokens, as the published processors have them."""


def write_demo_checkpoint(model_type: str, out: Path, *, seed: int = 0) -> None:
    """Write a tiny VLM of this type: sharded safetensors in bfloat16, index, processor settings.

    The same arguments write the same bytes. Raises ValueError if there is no tiny model of this type.
    """
    if model_type not in _TINY:
        raise ValueError(f"no demo checkpoint of model_type {model_type!r}; there are: {', '.join(_TINY)}")
    text, vision, normalisation = _TINY[model_type]
    config_class: Any = CONFIG_MAPPING[model_type]
    config = config_class(text_config=dict(text), vision_config=dict(vision), **_TOKENS)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    _randomise(model, seed)
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=0)
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out, max_shard_size="200KB")
    _write_processor(out, model_type, config.vision_config, normalisation)


@torch.no_grad()
def _randomise(model: nn.Module, seed: int) -> None:
    """Weights that keep the variance of what flows through, so that attention and positions matter."""
    generator = torch.Generator().manual_seed(seed)
    for _, weight in sorted(model.named_parameters()):
        noise = torch.randn(weight.shape, generator=generator)
        if weight.ndim > 1:
            weight.copy_(noise * weight[0].numel() ** -0.5)
        else:
            weight.add_(noise.to(weight.dtype), alpha=0.1)


def _write_processor(out: Path, model_type: str, vision: Any, normalisation: Mapping[str, Any]) -> None:  # noqa: ANN401
    family = FAMILIES[model_type]
    area = (vision.patch_size * vision.spatial_merge_size) ** 2
    shared = {
        **normalisation,
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "merge_size": vision.spatial_merge_size,
        "patch_size": vision.patch_size,
        "resample": 3,
        "rescale_factor": 1 / 255,
        "temporal_patch_size": vision.temporal_patch_size,
    }
    smallest, largest = (tokens * area for tokens in _IMAGE_TOKENS)
    image = {"image_processor_type": "Qwen2VLImageProcessor", "size": _size(smallest, largest)}
    video_type = "Qwen3VLVideoProcessor" if family.bounds_span_frames else "Qwen2VLVideoProcessor"
    video = {"video_processor_type": video_type, "size": _size(*family.video_pixels)}
    _write_json(out / "preprocessor_config.json", {**shared, **image})
    _write_json(out / "video_preprocessor_config.json", {**shared, **video})


def _size(smallest: int, largest: int) -> dict[str, int]:
    return {"shortest_edge": smallest, "longest_edge": largest}


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
