"""Every whole demo model that transformers knows loads with it and generates, from text and from an image."""

import inspect
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from checkpoints import MODEL_TYPES, Checkpoints, sampled
from vitwire_server.towers.layouts.packed import PackedFamily, sizes
from vitwire_server.towers.registry import FAMILIES
from vlms import ANSWERLESS, language_model

WHOLE = [
    name
    for name, row in FAMILIES.items()
    if name in MODEL_TYPES and row.model_type in CONFIG_MAPPING and name not in ANSWERLESS and not row.poolers
]
"""Those with a language model, in a layout that transformers reads."""
SQUARE = {"kimi_k25", "paddleocr_vl"}
"""Their processors emit patches as `(C, p, p)`."""
NEW = 3


def image_prompt(model_type: str, model: Any) -> dict[str, torch.Tensor]:
    """Token ids with a placeholder for each row of a 4 x 4 image of random patches."""
    size = sizes(model.config.vision_config)
    pixels = torch.rand(16, size.channels * size.temporal * size.patch**2)
    if model_type in SQUARE:
        pixels = pixels.view(16, -1, size.patch, size.patch)
    image = model.config.image_token_id
    ids = [5, 6, 502, *[image] * (16 // size.merge**2), 503, 7]
    inputs = {
        "input_ids": torch.tensor([ids]),
        "mm_token_type_ids": torch.tensor([[int(each == image) for each in ids]]),
        "pixel_values": pixels,
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
        "image_merge_sizes": torch.tensor([1]),
    }
    return {name: inputs[name] for name in inputs if name in inspect.signature(model.forward).parameters}


@pytest.mark.parametrize("model_type", sampled(WHOLE))
def test_a_demo_checkpoint_generates(model_type: str, checkpoints: Checkpoints) -> None:
    model = language_model(model_type, checkpoints(model_type))
    prompts = [{"input_ids": torch.tensor([[5, 6, 7]])}]
    if isinstance(FAMILIES[model_type], PackedFamily):
        prompts.append(image_prompt(model_type, model))
    for prompt in prompts:
        tokens = model.generate(**prompt, max_new_tokens=NEW, do_sample=False, eos_token_id=None)
        before = 1 if model.config.is_encoder_decoder else prompt["input_ids"].shape[1]
        assert tokens.shape == (1, before + NEW)
