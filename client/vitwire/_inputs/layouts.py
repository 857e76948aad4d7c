"""Outputs of processors that say an image's layout by a number or by a mask, and pad images to one number of tiles."""

from collections.abc import Mapping
from math import ceil

import numpy as np
import numpy.typing as npt

from vitwire._inputs.splitting import Cut
from vitwire._inputs.tensors import check_rank, integers, invalid, on_host, rank, rows

PHI4_PIXELS = "image_pixel_values"
LAYOUT_IDS = "aspect_ratio_ids"
PIXEL_MASK = "pixel_mask"
FLATTENED = "flattened_patches"
_SIZES, _MASK, _PIXELS = "image_sizes", "image_attention_mask", "pixel_values"


def images_of_layouts(outputs: Mapping[str, object], *, blank: bool = False) -> list[Cut]:
    """Images of Llama 3.2 Vision: tiles `(prompts, images, most tiles, 3, H, W)`, and the number of each layout.

    Images that only pad a prompt have the number 0 and are left out. With `blank`, images keep the tiles that pad them.
    """
    batch, ids = on_host(outputs[_PIXELS], _PIXELS), integers(outputs[LAYOUT_IDS], LAYOUT_IDS)
    if rank(batch) != 6 or ids.ndim != 2 or len(batch) != len(ids):
        raise invalid(LAYOUT_IDS, f"expected one for each image of {_PIXELS} (prompts, images, tiles, 3, H, W)")
    for prompt, (images, numbers) in enumerate(zip(batch, ids, strict=True)):
        if len(images) != len(numbers):
            field, images_of = f"{LAYOUT_IDS}[{prompt}]", f"{_PIXELS}[{prompt}]"
            raise invalid(field, f"expected one for each of {len(images)} images of {images_of}, got {len(numbers)}")
    layouts = layouts_of(batch[0].shape[1]) if len(batch) else []
    found: list[Cut] = []
    for prompt, (images, numbers) in enumerate(zip(batch, ids, strict=True)):
        for place, (image, number) in enumerate(zip(images, numbers, strict=True)):
            if not 0 <= number <= len(layouts):
                field = f"{LAYOUT_IDS}[{prompt}][{place}]"
                raise invalid(field, f"expected 0 to {len(layouts)}, got {number}", len(found))
            if number:
                down, across = layouts[number - 1]
                count = len(image) if blank else down * across
                found.append(Cut(image[:count], (count, down, across)))
    return found


def layouts_of(most: int) -> list[tuple[int, int]]:
    """Rows and columns of at most this number of tiles, in the order of their numbers, which begin with 1."""
    sides = range(1, most + 1)
    return [(down, across) for down in sides for across in sides if down * across <= most]


def images_of_canvases(outputs: Mapping[str, object], patch: int | None = None) -> list[Cut]:
    """Images of Phi-4: overview, crops of a canvas, mask without background; of Phi-3, which has none, with `patch`."""
    key = _PIXELS if patch else PHI4_PIXELS
    batch = on_host(outputs[key], key)
    check_rank(batch, key, 5, "(images, crops, 3, H, W)")
    sizes = integers(outputs.get(_SIZES), _SIZES).reshape(-1, 2)
    whole = [np.ones((len(crops), *[crops.shape[-1] // patch] * 2)) for crops in batch] if patch else None
    masks = whole or on_host(outputs.get(_MASK), _MASK)
    if not len(batch) == len(sizes) == len(masks):
        raise invalid(_MASK, f"expected one entry of {_SIZES} and {_MASK} for each of the {len(batch)} images")
    found = []
    for at, (crops, size, mask) in enumerate(zip(batch, sizes, masks, strict=True)):
        down, across = (int(length) // crops.shape[-1] for length in size)
        height, width = _extent_of_crops(np.asarray(mask) > 0, down, across, at)
        found.append(Cut(crops[: 1 + down * across], (1, height, width)))
    return found


def images_of_masks(outputs: Mapping[str, object], patch: int | None) -> list[Cut]:
    """Tiles of Aria `(tiles, 3, H, W)`, each an image, and a mask of the pixels that are not background."""
    batch, masks = on_host(outputs[_PIXELS], _PIXELS), outputs[PIXEL_MASK]
    if patch is None:
        raise invalid(PIXEL_MASK, "counts pixels: pass the model, whose patches grids count")
    shown = np.asarray(masks.detach().cpu() if hasattr(masks, "detach") else masks) > 0
    if shown.ndim != 3 or len(shown) != len(batch):
        raise invalid(
            PIXEL_MASK, f"expected one (H, W) for each of the {len(batch)} tiles, got the shape {shown.shape}"
        )
    found = []
    for at, own in enumerate(shown):
        height, width = _extent(own)
        if not height:
            raise invalid(PIXEL_MASK, "expected background at the bottom and at the right", at)
        found.append(Cut(rows(batch, at, at + 1), (1, ceil(height / patch), ceil(width / patch))))
    return found


def images_of_flattened_patches(outputs: Mapping[str, object]) -> list[Cut]:
    """Images of Pix2Struct `(images, patches, 2 + columns)`, padded: rows of patches behind their row and column."""
    batch = on_host(outputs[FLATTENED], FLATTENED)
    check_rank(batch, FLATTENED, 3, "(images, patches, 2 + columns)")
    found = []
    for at, patches in enumerate(batch):
        height, width = (int(patches[:, axis].max()) for axis in (0, 1))
        if height < 1 or width < 1 or height * width > len(patches):
            raise invalid(
                FLATTENED, f"expected rows and columns from 1, and a patch for each, got {height} x {width}", at
            )
        found.append(Cut(patches[: height * width, 2:], (1, height, width)))
    return found


def _extent(mask: npt.NDArray[np.bool_]) -> tuple[int, int]:
    """Height and width of what is not background; zeros unless that is a rectangle from the top left."""
    height, width = int(mask[:, 0].sum()), int(mask[0].sum())
    return (height, width) if mask[:height, :width].all() and mask.sum() == height * width else (0, 0)


def _extent_of_crops(mask: npt.NDArray[np.bool_], down: int, across: int, at: int) -> tuple[int, int]:
    """Rows and columns of patches that are not background; the overview's mask comes first."""
    side = mask.shape[-1]
    crops = mask[1 : 1 + down * across]
    if crops.shape != (down * across, side, side):
        raise invalid(_MASK, f"expected masks of {down} x {across} crops and of the overview", at)
    height, width = _extent(crops.reshape(down, across, side, side).swapaxes(1, 2).reshape(down * side, across * side))
    if (ceil(height / side), ceil(width / side)) != (down, across):
        raise invalid(_MASK, "expected background at the bottom and at the right, and no crop of background alone", at)
    return height, width
