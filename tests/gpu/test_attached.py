"""A model on a device whose tower was replaced by a service's: where its weights and rows are."""

import torch

from checkpoints import Checkpoints
from vitwire.integrations.transformers import attach, detach
from vlms import TowerEncoder, cases, generated, language_model


def test_the_weights_of_the_tower_leave_the_device_and_come_back(
    checkpoints: Checkpoints, device: torch.device
) -> None:
    folder = checkpoints("qwen3_vl")
    model = language_model("qwen3_vl", folder, torch.bfloat16)
    inputs = dict(cases(model))["images"]
    tower = model.to(device).model.visual
    weights = sum(weight.nbytes for weight in tower.parameters())
    on_device = {name: value.to(device) for name, value in inputs.items()}
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    attach(model, TowerEncoder(folder))
    assert {weight.device.type for weight in tower.parameters()} == {"cpu"}
    if device.type == "cuda":
        assert torch.cuda.memory_allocated(device) <= before - weights
    rows = model.get_image_features(on_device["pixel_values"], on_device["image_grid_thw"]).pooler_output[0]
    assert (rows.device, rows.dtype) == (device, torch.bfloat16)
    assert len(generated(model, on_device)[0]) > inputs["input_ids"].shape[1]
    detach(model)
    assert {weight.device for weight in model.parameters()} == {device}
