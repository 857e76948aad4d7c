"""Models without a feature method, whose tower is replaced as a module: the same logits and tokens with a server's."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.pix2struct.image_processing_pil_pix2struct import Pix2StructImageProcessorPil

from checkpoints import Checkpoints
from layout_prompts import LAYOUT_PROMPTS, mllama
from reference import TOLERANCE
from vitwire import Item
from vitwire.integrations.transformers import attach, detach
from vitwire.integrations.transformers._layouts import LAYOUTS
from vlms import TowerEncoder


@pytest.mark.parametrize(
    "model_type",
    [name if name == "mllama" else pytest.param(name, marks=pytest.mark.matrix) for name in LAYOUT_PROMPTS],
)
@torch.no_grad()
def test_the_same_logits_and_tokens_with_the_tower_of_a_server(model_type: str, checkpoints: Checkpoints) -> None:
    model, inputs = LAYOUT_PROMPTS[model_type](checkpoints(model_type))
    assert LAYOUTS[model_type].replaces
    model.eval()
    settings = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    local, tokens = model(**inputs).logits, model.generate(**inputs, **settings)
    weights = sum(weight.numel() for weight in model.parameters())
    attach(model, TowerEncoder(checkpoints(model_type)))
    assert sum(weight.numel() for weight in model.parameters()) < weights
    assert (model(**inputs).logits - local).abs().max() <= 10 * TOLERANCE * local.abs().max()
    assert torch.equal(model.generate(**inputs, **settings), tokens)
    blind = {name: torch.zeros_like(value) if "pixel" in name else value for name, value in inputs.items()}
    assert (model(**blind).logits - local).abs().max() > 1e-3 * local.abs().max()
    detach(model)
    assert sum(weight.numel() for weight in model.parameters()) == weights
    assert torch.equal(model(**inputs).logits, local)


@torch.no_grad()
def test_prompts_with_fewer_images_than_others_are_refused(checkpoints: Checkpoints) -> None:
    model, inputs = mllama(checkpoints("mllama"))
    inputs["aspect_ratio_ids"][1, 1] = 0
    attach(model, TowerEncoder(checkpoints("mllama")))
    with pytest.raises(
        ValueError, match=r"aspect_ratio_ids\[1\]\[1\]: the prompts of a batch must all have the same number"
    ):
        model(**inputs)


@torch.no_grad()
def test_pix2struct_generates_from_rows(checkpoints: Checkpoints) -> None:
    folder = checkpoints("pix2struct")
    model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    image = np.random.default_rng(0).integers(0, 255, (60, 90, 3), np.uint8)
    outputs = dict(Pix2StructImageProcessorPil.from_pretrained(folder)([image], return_tensors="pt"))
    settings = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    encoder = TowerEncoder(folder)
    rows = [each.torch() for each in encoder.encode(Item.from_processor(outputs))]
    mask = outputs["attention_mask"][:, : len(rows[0])]
    states = BaseModelOutput(last_hidden_state=torch.stack(rows))
    remote = model.generate(encoder_outputs=states, attention_mask=mask, **settings)
    assert torch.equal(remote, model.generate(**outputs, **settings))
    blind = BaseModelOutput(last_hidden_state=torch.zeros_like(states.last_hidden_state))
    assert not torch.equal(remote, model.generate(encoder_outputs=blind, attention_mask=mask, **settings))
