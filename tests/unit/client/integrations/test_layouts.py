"""Arguments of feature methods that contradict each other."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from checkpoints import Checkpoints
from client_models import client_model
from prompts import images
from vitwire import InvalidItem, Item
from vitwire.integrations.transformers._features import Call
from vitwire.integrations.transformers._layouts import LAYOUTS
from vitwire_server.demo.checkpoint import demo_config

WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("qwen2_vl", {"image_grid_thw": None}, "grid_thw: is missing"),
    ("qwen2_vl", {"image_grid_thw": torch.tensor([[1, 8, 8]])}, "pixel_values: has 136 rows, .* adds up to 64"),
    ("mistral3", {"image_sizes": torch.tensor([[56, 56]])}, "pixel_values: has 3 images, image_sizes has 1"),
    ("gemma4", {"image_position_ids": torch.zeros(2, 63, 2, dtype=torch.int64)}, "pixel_values: has 3 items"),
    ("step3p7", {"num_local_patches": torch.tensor([2, 0, 2])}, "pixel_values_local: has 5 rows, .* adds up to 4"),
    ("deepseek_vl_hybrid", {"high_res_pixel_values": torch.zeros(2, 3, 8, 8)}, "high_res_pixel_values"),
    ("llava_onevision", {"image_sizes": torch.tensor([[56, 56]]), "batch_num_images": None}, "has 3 items"),
]


def items_of(model_type: str, changes: dict[str, Any], checkpoints: Checkpoints) -> list[Item]:
    config = demo_config(model_type)
    call = Call(SimpleNamespace(config=config), "image", images(config).arguments | changes)
    return LAYOUTS[model_type].items(call, client_model(checkpoints(model_type)))


@pytest.mark.parametrize(("model_type", "changes", "message"), WRONG)
def test_arguments_that_contradict_each_other_are_refused(
    model_type: str, changes: dict[str, Any], message: str, checkpoints: Checkpoints
) -> None:
    assert items_of(model_type, {}, checkpoints)
    with pytest.raises(InvalidItem, match=message):
        items_of(model_type, changes, checkpoints)


def test_images_without_crops_need_no_arguments_for_them(checkpoints: Checkpoints) -> None:
    """DeepSeek-OCR-2's processor leaves out crops if there are none."""
    changes = {"pixel_values_local": None, "num_local_patches": torch.tensor([0, 0, 0])}
    assert [item.grid for item in items_of("step3p7", changes, checkpoints)] == [(1, 1, 1)] * 3


def test_tiles_of_zeros_are_padding_and_prompts_may_have_no_others(checkpoints: Checkpoints) -> None:
    config = demo_config("idefics3")
    pixels = torch.rand(3, 4, 3, 56, 56) + 1
    for tiles, count in zip(pixels, (2, 0, 4), strict=True):
        tiles[count:] = 0
    mask = (pixels != 0)[:, :, 0]
    call = Call(SimpleNamespace(config=config), "image", {"pixel_values": pixels, "pixel_attention_mask": mask})
    layout, described = LAYOUTS["idefics3"], client_model(checkpoints("idefics3"))
    items = layout.items(call, described)
    assert [item.grid for item in items] == [(1, 1, 1)] * 6
    rows = layout.features(call, [torch.zeros(4, 64)] * 6)
    assert [len(own) for own in rows] == [8, 0, 16]
    mask[0, 1, 40:] = False
    with pytest.raises(ValueError, match="covers a part of a tile"):
        layout.items(call, described)
