"""Pixels that the server prepares, against the model's own Hugging Face processor."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import AutoImageProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from checkpoints import MODEL_TYPES, Checkpoints, sampled
from client_models import client_model
from prepared import patches, photograph, recipes
from vitwire import ProcessorOptions
from vitwire_server.core.items import Modality
from vitwire_server.core.models import Resizing
from vitwire_server.preparing.rules.recipe import Recipe
from vitwire_server.towers.checkpoints.checkpoint import open_checkpoint
from vitwire_server.towers.family import Accepts
from vitwire_server.towers.registry import FAMILIES

PACKED = [name for name in MODEL_TYPES if FAMILIES[name].layout == "packed patches"]
NEEDS_TORCHVISION = {"minimax_m3_vl"}
"""Its own processor comes with no other backend; its rule and order are those of Qwen2-VL."""
SIZES = [(480, 640), (33, 250), (20, 24), (1500, 1200), (56, 56)]


def processor_of(model_type: str, folder: Path) -> Any:
    if model_type in NEEDS_TORCHVISION:
        return Qwen2VLImageProcessorPil.from_pretrained(folder)
    return AutoImageProcessor.from_pretrained(folder, backend="pil")


def assert_same(stock: Any, image: Image.Image, recipe: Recipe) -> None:
    """The grid that the model's processor made of an image, and its values, which it may have rounded."""
    ours, grid = patches(image, recipe)
    assert tuple(stock["image_grid_thw"][0]) == grid, image.size
    mean, std = (np.array(side).reshape(3, 1) for side in (recipe.settings.mean, recipe.settings.std))
    floats = (ours.reshape(len(ours), 3, -1) * recipe.settings.rescale_factor - mean) / std
    frames = stock["pixel_values"].reshape(len(ours), 3, recipe.temporal, -1)
    assert np.abs(frames - floats[:, :, None]).max() < 2 / 255 / min(recipe.settings.std), image.size


@pytest.mark.parametrize("model_type", sampled(PACKED))
def test_images_are_prepared_as_the_processor_does(model_type: str, checkpoints: Checkpoints) -> None:
    folder = checkpoints(model_type)
    recipe = recipes(folder).get(Modality.IMAGE)
    if recipe is None:
        assert open_checkpoint(str(folder)).preprocessing()[Modality.IMAGE].resizing is Resizing.OTHER
        return
    processor = processor_of(model_type, folder)
    for size in SIZES:
        image = photograph(*size)
        assert_same(processor(images=[image], return_tensors="np"), image, recipe)


@pytest.mark.parametrize("model_type", sampled(PACKED))
def test_small_images_have_the_grid_that_the_processor_gives_them(model_type: str, checkpoints: Checkpoints) -> None:
    """Random sides, shorter than a token, a patch or a pixel per token among them; so are refusals."""
    folder = checkpoints(model_type)
    recipe = recipes(folder).get(Modality.IMAGE)
    if recipe is None:
        return
    processor = processor_of(model_type, folder)
    rng = np.random.default_rng(8)
    for height, width in [(10, 58), (58, 10), (1, 1), (1, 199), (1, 300), *rng.integers(1, 120, (30, 2)).tolist()]:
        image = np.zeros((height, width, 3), np.uint8)
        try:
            stock = tuple(processor(images=[image], return_tensors="np")["image_grid_thw"][0])
        except ValueError:
            with pytest.raises(ValueError, match="too long"):
                patches(image, recipe)
        else:
            assert patches(image, recipe)[1] == stock, (height, width)


BOUNDS = [
    ({"max_pixels": 128 * 128}, {}),
    ({"min_pixels": 700 * 700}, {}),
    ({}, {"shortest_edge": 100 * 100, "longest_edge": 300 * 300}),
    ({"max_pixels": 200 * 200}, {"shortest_edge": 100 * 100, "longest_edge": 900 * 900}),
]
"""Options by each of their names, also below the checkpoint's smallest area; `size` gives way."""


@pytest.mark.parametrize("model_type", sampled([*PACKED, "hunyuan_vl", "hy_v4_vl"]))
def test_options_are_those_of_the_processor(model_type: str, checkpoints: Checkpoints) -> None:
    folder = checkpoints(model_type)
    recipe = recipes(folder).get(Modality.IMAGE)
    if recipe is None or not recipe.settings.options:
        return
    processor = processor_of(model_type, folder)
    for named, edges in BOUNDS:
        given: dict[str, Any] = named | ({"size": edges} if edges else {})
        options = ProcessorOptions.of(given)
        assert options
        least = options.min_pixels or recipe.settings.min_pixels
        most = options.max_pixels or recipe.settings.max_pixels
        if "min_pixels" not in processor.valid_kwargs.__annotations__:
            given = {"size": {"shortest_edge": least, "longest_edge": most}}
        for size in SIZES:
            image = photograph(*size)
            stock = processor(images=[image], return_tensors="np", **given)
            assert_same(stock, image, recipe.within((least, most)))


@pytest.mark.parametrize("model_type", sampled(PACKED))
def test_clients_know_what_is_prepared(model_type: str, checkpoints: Checkpoints) -> None:
    family, model = FAMILIES[model_type], client_model(checkpoints(model_type))
    assert ("image" in model.prepared) is (family.images is Accepts.PICTURES)
    assert ("video" in model.prepared) is (family.videos is Accepts.PICTURES)
