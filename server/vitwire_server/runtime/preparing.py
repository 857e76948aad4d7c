"""Pictures prepared in the engine, on its device: what a decoder would send, written into the tower's input.

The rules are those of `preparing.rules`, run on tensors; resizing is Pillow's integer arithmetic, bit for bit.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import PIL
import torch
from torch import Tensor

from vitwire_server.core.items import Item, Modality
from vitwire_server.preparing import pillow
from vitwire_server.preparing.rules.filters import PRECISION, rows_first, taps
from vitwire_server.preparing.rules.patches import Pixels, Size
from vitwire_server.preparing.rules.pictures import Picture
from vitwire_server.preparing.rules.recipe import Recipe
from vitwire_server.preparing.rules.sizes import resized
from vitwire_server.preparing.rules.tiles import cut
from vitwire_server.runtime.staging import Stager

_ROWS, _COLUMNS = 0, 1
_CHOOSES_ORDER = int(PIL.__version__.partition(".")[0]) >= 13
"""Whether the installed Pillow, which decoders use, resizes rows first where that saves work."""
_PROBES = ((200, 300), (40, 30), (301, 90), (700, 640))
"""Sizes of test pictures: shrunk and enlarged, along one axis and both."""
_KEPT = 256
"""Tables of taps that stay on the device."""


class DevicePixels:
    """Pixels `(H, W, 3)`, uint8, on a device: a canvas of `preparing.rules.pictures`."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.shape = tuple(tensor.shape)

    def __getitem__(self, index: Any) -> "DevicePixels":  # noqa: ANN401  # slices, as of an array
        return DevicePixels(self.tensor[index])

    def placed(self, size: Size, corner: Size, background: tuple[int, ...]) -> Pixels:
        """See Canvas."""
        canvas = self.tensor.new_zeros((*size, 3))
        for channel, value in enumerate(background):  # by fills, as copying a colour would wait for the device
            canvas[..., channel] = value
        top, left = corner
        canvas[top : top + self.shape[0], left : left + self.shape[1]] = self.tensor
        return _as_pixels(canvas)

    def stacked(self, tiles: Sequence[Pixels]) -> Pixels:
        """See Canvas."""
        return _as_pixels(torch.stack([_tensor(tile) for tile in tiles]).permute(0, 3, 1, 2).contiguous())


class Preparer:
    """Prepares pictures. Used on the engine thread, within `Streams.computing`."""

    def __init__(self, recipes: Mapping[Modality, Recipe], stager: Stager) -> None:
        self._recipes = recipes
        self._stager = stager

    def write(self, item: Item, source: Tensor, pixels: Tensor, crops: Tensor | None) -> None:
        """Write the prepared picture of an item into rows of the tower's input.

        `source` is its flat uint8 picture on the device, `pixels` `(patches, C*T*p*p)` or a row for each tile, and
        `crops` the same for crops; None without any.
        """
        made, cropped = prepared(source.view(item.pixels.shape), self._recipes[item.modality])
        self._stager.stage(made.view(-1), item.modality, pixels)
        if crops is not None and cropped is not None:
            self._stager.stage(cropped.view(-1), item.modality, crops, crops=True)


def prepared(picture: Tensor, recipe: Recipe) -> tuple[Tensor, Tensor | None]:
    """The uint8 pixels and crops of a picture `(H, W, 3)` or frames `(F, H, W, 3)`, as `pillow.prepared` gives them."""
    frames = picture if picture.ndim == 4 else picture[None]
    if recipe.settings.tiling:
        made = [_cut(frame, recipe) for frame in frames]
        crops = [cropped for _, cropped in made if cropped is not None]
        return torch.cat([tiles for tiles, _ in made]), torch.cat(crops) if crops else None
    is_clip = picture.ndim == 4
    size = resized(picture.shape[-3], picture.shape[-2], recipe, len(frames) if is_clip else recipe.temporal)
    at_size = torch.stack([resize(frame, size, recipe.settings.resample) for frame in frames])
    return _patches(at_size, recipe.temporal if is_clip else 1, recipe), None


def fault_of(recipes: Mapping[Modality, Recipe], device: torch.device) -> str:
    """Why this device cannot prepare pictures as Pillow does; empty if drawn pictures come out equal."""
    rng = np.random.default_rng(0)
    for modality, recipe in recipes.items():
        for height, width in _PROBES:
            shape = (height, width, 3) if modality is Modality.IMAGE else (3, height, width, 3)
            picture = rng.integers(0, 256, shape, np.uint8)
            try:
                expected = pillow.prepared(picture, recipe)
            except ValueError:  # a size that this model's processor refuses
                continue
            try:
                made = prepared(torch.from_numpy(picture).to(device), recipe)
            except RuntimeError as error:
                return f"{height}x{width} failed: {str(error).partition(chr(10))[0]}"
            wanted = (expected.pixels, expected.crops)
            if not all(map(_equal, made, wanted)):
                return f"{height}x{width} differs from what Pillow {PIL.__version__} makes of it"
    return ""


def _equal(own: Tensor | None, expected: Pixels | None) -> bool:
    if own is None or expected is None:
        return own is None and expected is None
    return own.shape == expected.shape and torch.equal(own.cpu(), torch.from_numpy(expected))


def resize(pixels: Tensor, size: Size, resample: int) -> Tensor:
    """Pixels `(H, W, 3)`, uint8, at a size."""
    height, width = pixels.shape[:2]
    order = (_ROWS, _COLUMNS) if _CHOOSES_ORDER and rows_first((height, width), size) else (_COLUMNS, _ROWS)
    for axis in order:
        if pixels.shape[axis] != size[axis]:
            pixels = _along(pixels, axis, size[axis], resample)
    return pixels


def _along(pixels: Tensor, axis: int, length: int, resample: int) -> Tensor:
    """One pass: sums of weighted pixels in 32 bits, rounded and clipped to 8."""
    places, weights = _table(pixels.shape[axis], length, resample, pixels.device)
    shape = [length if each == axis else side for each, side in enumerate(pixels.shape)]
    total = torch.full(shape, 1 << (PRECISION - 1), dtype=torch.int32, device=pixels.device)
    along = [-1 if each == axis else 1 for each in range(pixels.ndim)]
    for place, weight in zip(places, weights, strict=True):
        total.addcmul_(pixels.index_select(axis, place).int(), weight.view(along))
    return total.bitwise_right_shift_(PRECISION).clamp_(0, 255).to(torch.uint8)


@lru_cache(_KEPT)
def _table(source: int, target: int, resample: int, device: torch.device) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """For each tap, the pixel of every result and its weight."""
    starts, weights = taps(source, target, resample)
    own = _moved(weights, device).t().contiguous()
    first = _moved(starts, device).long()
    places = torch.arange(len(own), device=device)[:, None] + first
    return places.clamp_(max=source - 1).unbind(), own.unbind()


def _moved(array: npt.NDArray[np.int32], device: torch.device) -> Tensor:
    """The array on the device, without waiting for work there."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _patches(frames: Tensor, depth: int, recipe: Recipe) -> Tensor:
    """Rows of patches of frames `(F, H, W, 3)`, in the order of `rules.patches.patch_rows`."""
    spare = -len(frames) % depth
    if spare:
        frames = torch.cat([frames, frames[-1:].expand(spare, -1, -1, -1)])
    patch, merge = recipe.patch, 1 if recipe.raster else recipe.merge
    high, wide = frames.shape[1] // (patch * merge), frames.shape[2] // (patch * merge)
    canvas = frames.reshape(-1, depth, high, merge, patch, wide, merge, patch, 3)
    columns = (1, 4, 7, 8) if recipe.channels_last else (8, 1, 4, 7)
    return canvas.permute(0, 2, 5, 3, 6, *columns).reshape(-1, 3 * depth * patch * patch)


def _cut(picture: Tensor, recipe: Recipe) -> tuple[Tensor, Tensor | None]:
    assert recipe.settings.tiling, "else there are patches"
    size = (picture.shape[0], picture.shape[1])
    tiles = cut(Picture(size, _as_pixels(picture), _resizer, recipe.settings.resample), recipe.settings.tiling)
    return _tensor(tiles.pixels), None if tiles.crops is None else _tensor(tiles.crops)


def _resizer(pixels: Pixels, size: Size, resample: int) -> Pixels:
    return _as_pixels(resize(_tensor(pixels), size, resample))


def _as_pixels(tensor: Tensor) -> Pixels:
    """The rules take it for an array: they only cut it, and leave the rest to its methods."""
    return cast("Pixels", DevicePixels(tensor))


def _tensor(pixels: Pixels) -> Tensor:
    assert isinstance(pixels, DevicePixels), "of which the rules were begun"
    return pixels.tensor
