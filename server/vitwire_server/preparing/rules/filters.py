"""Pillow's resampling of 8 bits as integers: which pixels each result is made of, and their weights.

Resizing is two passes, over columns and then over rows. Each sums pixels times weights of 22 bits after the point, adds
a half, shifts, and clips to 8 bits; an axis whose length stays is left out. This is `src/libImaging/Resample.c` of
Pillow 12: `precompute_coeffs` and `normalize_coeffs_8bpc`. Nearest is one tap of weight 1.
"""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

PRECISION = 22
"""Bits of a weight after the point."""
_KEPT = 256
"""Tables that are kept: two for each pair of sizes."""
_NEAREST = 0
_HAMMING_MEAN, _HAMMING_SWING = float(np.float32(0.54)), float(np.float32(0.46))
"""Pillow writes these two in single precision, and computes in double."""


class Taps(NamedTuple):
    """For each result along an axis: its first pixel, and the weights of the pixels from there on."""

    starts: npt.NDArray[np.int32]
    """`(length,)`"""
    weights: npt.NDArray[np.int32]
    """`(length, taps)`; 0 beyond the last pixel."""


Array = npt.NDArray[np.float64]


def _sinc(x: Array) -> Array:
    """By the C library's sine, as Pillow; numpy's may differ in the last bit."""
    return np.array([math.sin(value) / value if value else 1.0 for value in (x * math.pi).ravel().tolist()]).reshape(
        x.shape
    )


def _lanczos(x: Array) -> Array:
    return np.where((x >= -3.0) & (x < 3.0), _sinc(x) * _sinc(x / 3), 0.0)


def _bilinear(x: Array) -> Array:
    return np.maximum(0.0, 1.0 - np.abs(x))


def _bicubic(x: Array) -> Array:
    x, a = np.abs(x), -0.5
    near, far = ((a + 2.0) * x - (a + 3.0)) * x * x + 1, (((x - 5) * x + 8) * x - 4) * a
    return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))


def _box(x: Array) -> Array:
    return np.where((x > -0.5) & (x <= 0.5), 1.0, 0.0)


def _hamming(x: Array) -> Array:
    x = np.abs(x)
    cosines = np.array([math.cos(value) for value in (x * math.pi).ravel().tolist()]).reshape(x.shape)
    values = _sinc(x) * (_HAMMING_MEAN + _HAMMING_SWING * cosines)
    return np.where(x == 0.0, 1.0, np.where(x < 1.0, values, 0.0))  # the two numbers do not add up to 1


_FILTERS: dict[int, tuple[Callable[[Array], Array], float]] = {
    1: (_lanczos, 3.0),
    2: (_bilinear, 1.0),
    3: (_bicubic, 2.0),
    4: (_box, 0.5),
    5: (_hamming, 1.0),
}
"""By Pillow's number: the function, and its half width at a scale of 1."""


@lru_cache(_KEPT)
def taps(source: int, target: int, resample: int) -> Taps:
    """The taps of an axis of `source` pixels that is resized to `target`. Raises KeyError for another filter."""
    if resample == _NEAREST:
        return _nearest(source, target)
    function, width = _FILTERS[resample]
    scale = source / target
    stretch = max(scale, 1.0)
    support = width * stretch
    centres = (np.arange(target) + 0.5) * scale
    starts = np.maximum((centres - support + 0.5).astype(np.int32), 0)
    counts = np.minimum((centres + support + 0.5).astype(np.int32), source) - starts
    places = np.arange(counts.max())
    values = function((starts[:, None] + places - centres[:, None] + 0.5) * (1.0 / stretch))
    values[places >= counts[:, None]] = 0.0
    totals = np.add.accumulate(values, axis=1)[:, -1:]  # in this order, as sums of floats depend on it
    values = np.divide(values, totals, out=values, where=totals != 0)
    return Taps(starts, (values * (1 << PRECISION) + np.where(values >= 0, 0.5, -0.5)).astype(np.int32))


def _nearest(source: int, target: int) -> Taps:
    """One tap each, of weight 1; places are added up step by step, as Pillow's affine transform does."""
    steps = np.full(target, source / target)
    steps[0] /= 2
    return Taps(np.add.accumulate(steps).astype(np.int32), np.full((target, 1), 1 << PRECISION, np.int32))


def rows_first(source: tuple[int, int], target: tuple[int, int]) -> bool:
    """True if Pillow 13 resizes columns last: it does if rows shrink by more than twice as much as columns.

    The order matters, as each pass rounds. Found by comparison: Pillow does not document it; until 12 it never did.
    """
    shrinks = source[0] - target[0]
    return shrinks > 0 and shrinks > 2 * (source[1] - target[1])
