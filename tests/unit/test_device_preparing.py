"""Pictures prepared as tensors equal those that Pillow prepares, bit for bit, by every rule."""

import numpy as np
import pytest
import torch

from prepared import MODELS, recipe
from vitwire_server.core.items import Modality
from vitwire_server.core.models import Resizing
from vitwire_server.preparing import pillow
from vitwire_server.preparing.rules.recipe import Recipe
from vitwire_server.runtime import preparing
from vitwire_server.runtime.preparing import fault_of, prepared

SIZES = [(300, 400), (57, 55), (20, 90), (8, 160), (400, 21), (90, 301)]


def drawn(*shape: int) -> np.ndarray:
    """Smooth shapes with hard edges and noise, so that both rounding and order show."""
    rng = np.random.default_rng(shape[-2])
    coarse = rng.integers(0, 256, (*shape[:-3], shape[-3] // 9 + 1, shape[-2] // 9 + 1, 3)).repeat(9, -3).repeat(9, -2)
    noisy = coarse[..., : shape[-3], : shape[-2], :] + rng.integers(-40, 40, shape)
    return noisy.clip(0, 255).astype(np.uint8)


def assert_as_pillow(picture: np.ndarray, own: Recipe) -> None:
    try:
        expected = pillow.prepared(picture, own)
    except ValueError as error:
        with pytest.raises(ValueError, match=str(error).partition(":")[0]):
            prepared(torch.from_numpy(picture), own)
        return
    pixels, crops = prepared(torch.from_numpy(picture), own)
    assert pixels.dtype is torch.uint8
    np.testing.assert_array_equal(pixels.numpy(), expected.pixels)
    assert (crops is None) == (expected.crops is None)
    if crops is not None:
        np.testing.assert_array_equal(crops.numpy(), expected.crops)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", MODELS)
def test_images(name: str, size: tuple[int, int]) -> None:
    assert_as_pillow(drawn(*size, 3), MODELS[name][Modality.IMAGE])


@pytest.mark.parametrize("resample", range(6))
@pytest.mark.parametrize("resizing", [rule for rule in Resizing if rule is not Resizing.OTHER])
def test_patches_of_every_size(resizing: Resizing, resample: int) -> None:
    for merge, temporal, raster, last in ((2, 2, False, False), (1, 1, True, True), (2, 1, True, False)):
        own = recipe(
            patch=8, merge=merge, temporal=temporal, raster=raster, channels_last=last,
            min_pixels=32 * 32, max_pixels=96 * 96, resizing=resizing, resample=resample,
        )  # fmt: skip
        for size in ((70, 50), (20, 90), (200, 130)):
            assert_as_pillow(drawn(*size, 3), own)


@pytest.mark.parametrize("frames", [2, 3, 5])
@pytest.mark.parametrize("name", ["patches", "ratio", "canvas"])
def test_clips(name: str, frames: int) -> None:
    assert_as_pillow(drawn(frames, 60, 90, 3), MODELS[name][Modality.VIDEO])


def test_a_difference_from_pillow_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    own = {Modality.IMAGE: MODELS["patches"][Modality.IMAGE]}
    assert fault_of(own, torch.device("cpu")) == ""
    monkeypatch.setattr(preparing, "_CHOOSES_ORDER", not preparing._CHOOSES_ORDER)
    assert "differs from what Pillow" in fault_of(own, torch.device("cpu"))
