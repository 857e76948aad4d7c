"""Resizing by integers is Pillow's, bit for bit."""

import numpy as np
import pytest
from PIL import Image

from vitwire_server.preparing.rules.filters import PRECISION, rows_first, taps

SIZES = [
    ((37, 53), (20, 31)), ((20, 31), (37, 53)), ((64, 64), (1, 1)), ((1, 1), (5, 7)), ((1, 200), (3, 20)),
    ((100, 7), (100, 28)), ((100, 7), (33, 7)), ((480, 640), (224, 336)), ((300, 200), (299, 201)),
    ((367, 357), (286, 304)), ((1, 999), (1, 2)), ((999, 1), (2, 1)),
]  # fmt: skip


def along(pixels: np.ndarray, axis: int, length: int, resample: int) -> np.ndarray:
    """One pass."""
    if pixels.shape[axis] == length:
        return pixels
    starts, weights = taps(pixels.shape[axis], length, resample)
    moved = np.moveaxis(pixels, axis, 0).astype(np.int32)
    total = np.full((length, *moved.shape[1:]), 1 << (PRECISION - 1), np.int32)
    for tap in range(weights.shape[1]):
        source = np.minimum(starts + tap, len(moved) - 1)
        total += moved[source] * weights[:, tap].reshape(-1, 1, 1)
    return np.moveaxis(np.clip(total >> PRECISION, 0, 255).astype(np.uint8), 0, axis)


def resized(pixels: np.ndarray, target: tuple[int, int], resample: int) -> np.ndarray:
    """Both passes, in Pillow's order."""
    for axis in (0, 1) if rows_first(pixels.shape[:2], target) else (1, 0):
        pixels = along(pixels, axis, target[axis], resample)
    return pixels


@pytest.mark.parametrize("resample", range(6))
@pytest.mark.parametrize(("source", "target"), SIZES)
def test_two_passes_are_pillow_s(source: tuple[int, int], target: tuple[int, int], resample: int) -> None:
    rng = np.random.default_rng(source[0] * 1000 + target[1])
    for pixels in (
        rng.integers(0, 256, (*source, 3), np.uint8),
        rng.choice(np.array([0, 255], np.uint8), (*source, 3)),
    ):
        expected = np.asarray(Image.fromarray(pixels).resize((target[1], target[0]), resample))
        np.testing.assert_array_equal(resized(pixels, target, resample), expected)


@pytest.mark.parametrize("resample", range(6))
def test_random_sizes(resample: int) -> None:
    rng = np.random.default_rng(resample)
    for height, width, down, right in [*rng.integers(1, 150, (40, 4)).tolist(), *rng.integers(1, 400, (9, 4)).tolist()]:
        pixels = rng.integers(0, 256, (height, width, 3), np.uint8)
        expected = np.asarray(Image.fromarray(pixels).resize((right, down), resample))
        np.testing.assert_array_equal(resized(pixels, (down, right), resample), expected)


def test_a_pixel_at_the_centre_of_hamming_s_window_weighs_1() -> None:
    """Its two numbers in single precision add up to a little more, which moves a weight of this window by 1."""
    pixels = np.random.default_rng(0).integers(0, 256, (60_000, 22, 3), np.uint8)
    expected = np.asarray(Image.fromarray(pixels).resize((2, len(pixels)), 5))
    np.testing.assert_array_equal(along(pixels, 1, 2, 5), expected)


@pytest.mark.parametrize(("source", "target"), [((1080, 1920), (768, 1344)), ((2016, 1512), (1184, 864))])
def test_photographs(source: tuple[int, int], target: tuple[int, int]) -> None:
    test_two_passes_are_pillow_s(source, target, 3)


def test_sums_stay_within_32_bits() -> None:
    for source in (1, 3, 10, 100, 1999, 8000):
        for target in (1, 2, 7, 224, 3000):
            for resample in range(6):
                most = np.abs(taps(source, target, resample).weights.astype(np.int64)).sum(axis=1).max()
                assert 255 * most + (1 << (PRECISION - 1)) < 1 << 31
