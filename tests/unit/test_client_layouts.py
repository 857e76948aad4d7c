"""Arguments of feature methods that contradict each other."""

from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from prompts import clip, images
from vitwire.integrations.transformers._layouts import LAYOUTS, Call
from vitwire_server.demo.checkpoint import DEMO_MODELS

WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("qwen2_vl", {"image_grid_thw": None}, "image_grid_thw is missing; SimpleNamespace needs it for images"),
    ("qwen2_vl", {"image_grid_thw": torch.tensor([[1, 8, 8]])}, "pixel_values has 136 rows, .* ask for 64"),
    ("mistral3", {"image_sizes": torch.tensor([[56, 56]])}, "pixel_values has 3 images, image_sizes has 1"),
    ("gemma4", {"image_position_ids": torch.zeros(3, 63, 2, dtype=torch.int64)}, "not those of a full grid"),
    ("step3p7", {"num_local_patches": torch.tensor([2, 0, 2])}, "pixel_values_local has 5 rows, .* ask for 4"),
    ("deepseek_vl_hybrid", {"high_res_pixel_values": None}, "high_res_pixel_values is missing"),
    ("deepseek_vl_hybrid", {"high_res_pixel_values": torch.zeros(2, 3, 8, 8)}, "shorter"),
    ("llava_onevision", {"image_sizes": None}, "image_sizes is missing"),
]


def call_of(model_type: str, changes: dict[str, Any], modality: Any = "image") -> Call:
    config = CONFIG_MAPPING[model_type](**deepcopy(DEMO_MODELS[model_type].config))
    arguments = (images if modality == "image" else clip)(config).arguments
    return Call(SimpleNamespace(config=config), modality, arguments | changes, torch.float32)


@pytest.mark.parametrize(("model_type", "changes", "message"), WRONG)
def test_arguments_that_contradict_each_other_are_refused(
    model_type: str, changes: dict[str, Any], message: str
) -> None:
    assert LAYOUTS[model_type].items(call_of(model_type, {}))
    with pytest.raises(ValueError, match=message):
        LAYOUTS[model_type].items(call_of(model_type, changes))


def test_frames_of_a_video_have_one_size() -> None:
    whole = call_of("gemma4", {}, "video").arguments["video_position_ids"]
    other = whole.clone()
    other[1, 9:] = -1  # a frame of 3 x 3 patches would be 9 in other places
    other[1, :9] = torch.cartesian_prod(torch.arange(3), torch.arange(3)).flip(1)
    with pytest.raises(ValueError, match=r"frames of a video differ in size: \[\(3, 3\), \(3, 6\)\]"):
        LAYOUTS["gemma4"].items(call_of("gemma4", {"video_position_ids": other}, "video"))


def test_images_without_crops_need_no_arguments_for_them() -> None:
    call = call_of("step3p7", {"pixel_values_local": None, "num_local_patches": None})
    assert [item.grid for item in LAYOUTS["step3p7"].items(call)] == [(1, 1, 1)] * 3
