"""A comparison at start: a device prepares drawn pictures as Pillow does."""

from collections.abc import Iterator, Mapping

import numpy as np
import PIL
import torch
from torch import Tensor

from vitwire_server.core.items import Modality
from vitwire_server.core.models import Preprocessing
from vitwire_server.preparing import pillow
from vitwire_server.preparing.device.resizing import Job, prepare, prepared
from vitwire_server.preparing.rules.patches import CHANNELS, Pixels
from vitwire_server.preparing.rules.recipe import Recipe, affine

PROBES = ((200, 300), (40, 30), (301, 90), (700, 640))
"""Sizes of test pictures: shrunk and enlarged, along one axis and both."""
_FRAMES = 3


def fault_of(recipes: Mapping[Modality, Recipe], device: torch.device, dtype: torch.dtype) -> str:
    """Why the device cannot be used; empty if bytes equal Pillow's, and rows of `dtype` torch's of these bytes."""
    for recipe, picture in _drawn(recipes):
        size = f"{picture.shape[-3]}x{picture.shape[-2]}"
        try:
            expected = pillow.prepared(picture, recipe)
        except ValueError:  # a size that this model's processor refuses
            continue
        try:
            on_device = torch.from_numpy(picture).to(device)
            if not all(map(_equal, prepared(on_device, recipe), (expected.pixels, expected.crops))):
                return f"{size} differs from what Pillow {PIL.__version__} makes of it"
            if not _normalises(on_device, recipe, dtype):
                return f"{size} is normalised in another way than torch does it"
        except Exception as error:  # noqa: BLE001 - of Triton, its compiler or the device: decoders prepare then
            return f"{size} failed: {str(error).partition(chr(10))[0]}"
    return ""


def _drawn(recipes: Mapping[Modality, Recipe]) -> Iterator[tuple[Recipe, Pixels]]:
    rng = np.random.default_rng(0)
    for modality, recipe in recipes.items():
        for size in PROBES:
            shape = (*size, 3) if modality is Modality.IMAGE else (_FRAMES, *size, 3)
            yield recipe, rng.integers(0, 256, shape, np.uint8)


def _equal(made: Tensor | None, expected: Pixels | None) -> bool:
    if made is None or expected is None:
        return made is None and expected is None
    return torch.equal(made.cpu(), torch.from_numpy(expected.reshape(len(expected), -1)))


def _normalises(picture: Tensor, recipe: Recipe, dtype: torch.dtype) -> bool:
    rows = prepared(picture, recipe, dtype)
    plain = tuple(None if each is None else torch.empty_like(each, dtype=torch.uint8) for each in rows)
    assert plain[0] is not None
    prepare([Job(picture, recipe, plain[0], plain[1])])
    settings = (recipe.settings, recipe.settings.of_crops)
    return all(
        torch.equal(floats, _normalised(plain_bytes, each, recipe).to(dtype))
        for floats, plain_bytes, each in zip(rows, plain, settings, strict=True)
        if floats is not None and plain_bytes is not None
    )


def _normalised(rows: Tensor, settings: Preprocessing, recipe: Recipe) -> Tensor:
    """uint8 rows normalised by torch, in float32."""
    last = recipe.channels_last and not settings.tiling
    split = rows.view(len(rows), -1, CHANNELS) if last else rows.view(len(rows), CHANNELS, -1)
    shape = (1, 1, CHANNELS) if last else (1, CHANNELS, 1)
    scale, offset = (torch.tensor(values, device=rows.device).view(shape) for values in affine(settings))
    return torch.mul(split, scale).add_(offset).view(rows.shape)
