"""Every row of the table of models: passes of the device give the shapes and the bytes that Pillow gives."""

import numpy as np
import pytest
import torch

from checkpoints import ROWS, Checkpoints
from prepared import recipes, within
from vitwire_server.core.items import Modality
from vitwire_server.preparing import pillow
from vitwire_server.preparing.device.passes import program
from vitwire_server.preparing.device.resizing import prepared
from vitwire_server.preparing.rules.forms import drawing, form_of
from vitwire_server.preparing.rules.recipe import Recipe

SIZES = [(480, 640), (33, 250), (60, 24), (700, 300), (112, 112), (1080, 1920), (7, 400)]
DRAWN = (101, 83)
FRAMES = 5


@pytest.mark.parametrize("model_type", ROWS)
def test_every_model(model_type: str, checkpoints: Checkpoints) -> None:
    for modality, recipe in recipes(checkpoints(model_type)).items():
        frames = None if modality is Modality.IMAGE else FRAMES
        for size in SIZES:
            assert_shapes(size, frames, recipe)
        assert_pixels((*DRAWN, 3) if frames is None else (FRAMES, *DRAWN, 3), recipe)


def assert_shapes(size: tuple[int, int], frames: int | None, recipe: Recipe) -> None:
    picture = (*size, 3) if frames is None else (frames, *size, 3)
    depth = 1 if frames is None else recipe.temporal
    try:
        form = form_of(picture, recipe)
    except ValueError as error:
        with pytest.raises(ValueError, match=str(error).partition(":")[0]):
            program(size, recipe, frames, depth)
        return
    made = program(size, recipe, frames, depth)
    groups = -(-(frames or 1) // made.depth)
    assert (groups * made.rows[0], made.columns[0]) == (form.pixels[0], np.prod(form.pixels[1:]))
    crops = form.crops or (0, 0)
    assert (groups * made.rows[1], made.columns[1]) == (crops[0], np.prod(crops[1:]))
    assert drawing(size, recipe, frames).grid[1:] == form.grid[1:]
    within(made, 3 * size[0] * size[1])


def assert_pixels(shape: tuple[int, ...], recipe: Recipe) -> None:
    picture = np.random.default_rng(3).integers(0, 256, shape, np.uint8)
    try:
        expected = pillow.prepared(picture, recipe)
    except ValueError:  # a size that the model's processor refuses
        return
    pixels, crops = prepared(torch.from_numpy(picture), recipe)
    np.testing.assert_array_equal(pixels, expected.pixels.reshape(len(expected.pixels), -1))
    assert (crops is None) == (expected.crops is None)
    if crops is not None and expected.crops is not None:
        np.testing.assert_array_equal(crops, expected.crops.reshape(len(expected.crops), -1))
