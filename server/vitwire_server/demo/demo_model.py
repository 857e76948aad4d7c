"""A demo model: a whole VLM of tiny size with random weights, and how it is written in hub layout."""

import json
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, GenerationConfig, PreTrainedModel

from vitwire_server.towers.configs import Config

Json = dict[str, Any]

TEXT = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
SHARD = "200KB"
"""Largest shard, so that tiny checkpoints have several too."""
CLIP = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
HALF = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
STEPS = {
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "rescale_factor": 1 / 255,
}
"""What every processor here does with an image."""
_IMAGE_TOKEN = {"image_token_id": 500}


def save_plain(model: PreTrainedModel, out: Path) -> None:
    """As transformers writes it."""
    model.save_pretrained(out, max_shard_size=SHARD)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoModel:
    """One demo model: its configuration, its processors' files, and how its authors publish it."""

    config: Json
    files: Callable[[Config], Mapping[str, Json]]
    """From the configuration to the processors' files, by name."""
    base: str | None = None
    """`model_type` of the model that is built, if it is not the checkpoint's own."""
    auto: Any = AutoModelForImageTextToText
    """What builds the whole model of its configuration."""
    save: Callable[[PreTrainedModel, Path], None] = save_plain
    """Writes weights and config.json in the layout that the model's authors publish."""


def demo_vlm(
    *,
    text: Json,
    vision: Json,
    image: Json,
    video: Json | None = None,
    fields: Mapping[str, Any] = _IMAGE_TOKEN,
    **others: Any,  # noqa: ANN401 - those of DemoModel
) -> DemoModel:
    """A demo model with fixed processor settings; `fields` are the rest of its configuration."""
    config = {"text_config": text, "vision_config": vision, **fields}
    files = {"preprocessor_config.json": {**STEPS, **image}}
    if video:
        files["video_preprocessor_config.json"] = {**STEPS, **video}
    return DemoModel(config=config, files=lambda _: files, **others)


def write(model_type: str, demo: DemoModel, out: Path, seed: int) -> None:
    """Write a checkpoint of this type. The same arguments write the same bytes."""
    config = CONFIG_MAPPING[demo.base or model_type](**deepcopy(demo.config))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # `randomise` adds to what transformers draws
        model = demo.auto.from_config(config, dtype=torch.bfloat16)
    randomise(model, seed)
    if model.can_generate():
        model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=0)
    out.mkdir(parents=True, exist_ok=True)
    demo.save(model, out)
    for name, content in demo.files(config).items():
        write_json(out / name, content)


@torch.no_grad()
def randomise(model: nn.Module, seed: int) -> None:
    """Weights that keep the variance of what flows through, so that attention and positions matter."""
    generator = torch.Generator().manual_seed(seed)
    for _, weight in sorted(model.named_parameters()):
        noise = torch.randn(weight.shape, generator=generator)
        if weight.ndim > 1:
            weight.copy_(noise * weight[0].numel() ** -0.5)
        else:
            weight.add_(noise.to(weight.dtype), alpha=0.1)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Sorted, so that the same content gives the same bytes."""
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
