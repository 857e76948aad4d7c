"""Equal frames of an image are sent once."""

import numpy as np
import pytest
import torch

from vitwire._transport.uploads import Patch, single

PATCH = Patch(3, 2, 4)
ROWS = 5


def repeated(dtype: str = "float32") -> np.ndarray:
    once = np.random.default_rng(0).integers(0, 256, (ROWS, 3, 1, 4)).astype(dtype)
    return np.repeat(once, 2, axis=2).reshape(ROWS, 24)


@pytest.mark.parametrize("dtype", ["float32", "float16", "uint8", ">f4"])
def test_one_of_equal_frames(dtype: str) -> None:
    pixels = repeated(dtype)
    expected = pixels.reshape(ROWS, 3, 2, 4)[:, :, 1].reshape(ROWS, 12)
    for source in (pixels, np.asfortranarray(pixels), np.repeat(pixels, 2, axis=1)[:, ::2]):
        got = single(source, PATCH)
        assert got.dtype == dtype
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_tensors(dtype: torch.dtype) -> None:
    pixels = torch.from_numpy(repeated()).to(dtype)
    assert single(pixels, PATCH).equal(pixels.view(ROWS, 3, 2, 4)[:, :, 0].reshape(ROWS, 12))
    pixels[-1, -1] += 1
    assert single(pixels, PATCH) is pixels


@pytest.mark.parametrize(("place", "value"), [((0, 0), 1.5), ((ROWS - 1, 23), 1.5), ((2, 4), -0.0)])
def test_frames_that_differ_in_any_bit_are_all_sent(place: tuple[int, int], value: float) -> None:
    pixels = repeated()
    pixels[2, 0] = pixels[2, 4] = 0.0
    assert single(pixels, PATCH) is not pixels
    pixels[place] = value
    assert single(pixels, PATCH) is pixels


def test_values_that_are_not_finite_are_compared_by_their_bits() -> None:
    pixels = repeated()
    pixels.reshape(ROWS, 3, 2, 4)[1, 0, :, 0] = np.nan
    assert np.isnan(single(pixels, PATCH)).sum() == 1


@pytest.mark.parametrize("shape", [(0, 24), (ROWS, 12), (ROWS, 3, 8), (ROWS, 48), (24,)])
def test_other_shapes_stay_as_they_are(shape: tuple[int, ...]) -> None:
    pixels = np.zeros(shape, np.float32)
    got = single(pixels, PATCH)
    assert got.shape[1:] in (shape[1:], (12,))
    assert got is pixels or shape == (0, 24)


def test_towers_without_a_time_axis() -> None:
    pixels = np.zeros((ROWS, 12), np.float32)
    assert single(pixels, Patch(3, 1, 4)) is pixels
