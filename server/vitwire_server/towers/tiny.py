"""What tiny checkpoints of every family share."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

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
"""Of a checkpoint at most, so that tiny ones have several too."""
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
