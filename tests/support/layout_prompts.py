"""Prompts for models without feature methods, with images as their own processors emit them."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

Inputs = dict[str, Any]
TILES = [[(2, 1), (1, 1)], [(1, 4), (2, 2)]]
CANVASES = [(5, 12), (8, 8), (19, 3)]


def mllama(folder: Path) -> tuple[Any, Inputs]:
    """Two prompts of two images each, with tokens before, between and behind the images."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    ids = torch.randint(5, 400, (2, 9), generator=torch.Generator().manual_seed(0))
    ids[:, [2, 5]] = model.config.image_token_index
    pixels = torch.zeros(2, 2, 4, 3, 56, 56)
    numbers, held = torch.zeros(2, 2, dtype=torch.int64), torch.zeros(2, 2, 4, dtype=torch.int64)
    mask = torch.zeros(2, 9, 2, 4, dtype=torch.int64)
    known = model.config.vision_config.supported_aspect_ratios
    for prompt, layouts in enumerate(TILES):
        for image, (rows, columns) in enumerate(layouts):
            count = rows * columns
            pixels[prompt, image, :count] = random(count, 3, 56, 56)
            numbers[prompt, image] = 1 + known.index([rows, columns])
            held[prompt, image, :count] = 1
            mask[prompt, (2, 5)[image] :, image, :count] = 1
    inputs = {"pixel_values": pixels, "aspect_ratio_ids": numbers, "aspect_ratio_mask": held}
    return model, {"input_ids": ids, "cross_attention_mask": mask, **inputs}


def phi4(folder: Path) -> tuple[Any, Inputs]:
    """A prompt of three images, by the sizes of their parts that are not background."""
    eager: Any = AutoModelForCausalLM
    model = eager.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    pixels, masks = torch.zeros(3, 4, 3, 112, 112), torch.ones(3, 4, 8, 8)
    sizes, tokens = [], [5, 6]
    for image, (height, width) in enumerate(CANVASES):
        rows, columns = -(-height // 8), -(-width // 8)
        canvas = torch.zeros(rows * 8, columns * 8)
        canvas[:height, :width] = 1
        crops = canvas.view(rows, 8, columns, 8).transpose(1, 2).reshape(-1, 8, 8)
        masks[image, 1 : 1 + len(crops)] = crops
        pixels[image, : 1 + len(crops)] = random(1 + len(crops), 3, 112, 112)
        sizes.append([rows * 112, columns * 112])
        own = -(-height // 2) * (-(-width // 2) + 1) + 1 + 4 * 5
        tokens += [7, *[model.config.vision_config.image_token_id] * own]
    inputs = {"image_pixel_values": pixels, "image_sizes": torch.tensor(sizes), "image_attention_mask": masks}
    return model, {"input_ids": torch.tensor([[*tokens, 8]]), **inputs}


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


LAYOUT_PROMPTS = {"mllama": mllama, "phi4_multimodal": phi4}
