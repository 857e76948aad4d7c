"""Images whose processor repeated them, where a patch has two frames: one is sent, and the server repeats it."""

import sys
from math import prod
from typing import Any, NamedTuple

import numpy as np


class Patch(NamedTuple):
    """The axes of a patch, `(C, T, p*p)`."""

    channels: int
    frames: int
    area: int


def single(pixels: Any, patch: Patch) -> Any:  # noqa: ANN401  # an array or a tensor
    """Patches `(patches, C*p*p)` with one of the equal frames of `pixels`, `(patches, C*T*p*p)`.

    Returns `pixels` if its frames differ in any bit, or if it has another shape.
    """
    rows = pixels.shape[0]
    if patch.frames == 1 or tuple(pixels.shape) != (rows, prod(patch)):
        return pixels
    bits = _bits(pixels).reshape(rows, *patch)
    if not all(_equal(bits[:few], patch.frames) for few in (1, rows)):  # most that differ do so in the first patch
        return pixels
    return pixels.reshape(rows, *patch)[:, :, 0].reshape(rows, patch.channels * patch.area)


def _equal(bits: Any, frames: int) -> bool:  # noqa: ANN401  # as above
    return all(bool((bits[:, :, 0] == bits[:, :, frame]).all()) for frame in range(1, frames))


def _bits(pixels: Any) -> Any:  # noqa: ANN401  # as above
    """As integers: zeros of two signs differ, and NaN equals itself."""
    if isinstance(pixels, np.ndarray):
        return pixels.view(f"i{pixels.dtype.itemsize}") if pixels.dtype.kind == "f" else pixels
    torch = sys.modules["torch"]  # it is a tensor
    return pixels.detach().view({2: torch.int16, 4: torch.int32}.get(pixels.element_size(), pixels.dtype))
