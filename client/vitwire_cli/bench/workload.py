"""The benchmark's requests: random items of given sizes."""

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from vitwire import Item, Model
from vitwire.items import Modality

Grid = tuple[int, int, int]
GridOf = Callable[[Item], Grid]
"""Sends a picture, and returns the grid that the server chose."""
Form = Literal["pixels", "picture", "jpeg"]
"""pixels: what a processor returns; picture: RGB in memory; jpeg: a file of it. The server prepares the latter two."""

_COARSE = 16
"""Pixels for each value of a picture's low frequencies."""
_NOISE = 8
_MIX_REQUESTS = 1024
"""Requests drawn from a weighted mix before they repeat."""
_MAX_WARMUP = 32


class ImageSize(NamedTuple):
    """A size of `--size`."""

    width: int
    height: int
    weight: float | None = None

    @classmethod
    def parse(cls, text: str) -> "ImageSize":
        """Raises ValueError unless the text is WIDTHxHEIGHT or WIDTHxHEIGHT:WEIGHT."""
        found = re.fullmatch(r"([1-9]\d{0,4})x([1-9]\d{0,4})(?::(\d{1,6}(?:\.\d{1,6})?))?", text)
        if found is None or (found[3] is not None and not float(found[3])):
            raise ValueError(f"{text!r} is not WIDTHxHEIGHT or WIDTHxHEIGHT:WEIGHT")
        return cls(int(found[1]), int(found[2]), None if found[3] is None else float(found[3]))

    def __str__(self) -> str:
        """As it is parsed."""
        return f"{self.width}x{self.height}" + ("" if self.weight is None else f":{self.weight:g}")


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests, to be sent one after another and again from the first. Items that are equal are shared."""

    requests: Sequence[Sequence[Item]]
    sizes: Mapping[Any, Item] = field(default_factory=dict)
    """The item of each size of `--size`, or of the clip."""

    @property
    def warmup(self) -> Sequence[Sequence[Item]]:
        """Requests that show the server each kind of item once, up to a limit."""
        if len(self.requests) <= _MAX_WARMUP:
            return self.requests
        distinct = {id(item): item for items in self.requests for item in items}
        return [[item] for item in islice(distinct.values(), _MAX_WARMUP)]

    def __getitem__(self, number: int) -> Sequence[Item]:
        """The items of request `number`."""
        return self.requests[number % len(self.requests)]


@dataclass(frozen=True, slots=True)
class Shape:
    """A size as the model resizes and cuts it."""

    size: str
    grid: Grid
    tokens: int


def of_sizes(sizes: Sequence[ImageSize], items: Sequence[Item], count: int) -> Workload:
    """Requests of `count` items, of which there is one for each size.

    Sizes alternate; if any has a weight, each item's size is drawn by weight instead (1 for those without).
    """
    named = dict(zip(sizes, items, strict=True))
    if all(size.weight is None for size in sizes):
        endless, distinct = cycle(items), len(sizes) // math.gcd(len(sizes), count)
        return Workload([list(islice(endless, count)) for _ in range(distinct)], named)
    return Workload([[items[index] for index in row] for row in draws(sizes, count, _MIX_REQUESTS)], named)


def draws(sizes: Sequence[ImageSize], items: int, requests: int) -> list[list[int]]:
    """Indices of sizes drawn by weight, for each item of each request; the same each time."""
    weights = np.array([1.0 if size.weight is None else size.weight for size in sizes])
    drawn: list[list[int]] = (
        np.random.default_rng(0).choice(len(sizes), (requests, items), p=weights / weights.sum()).tolist()
    )
    return drawn


def random_item(size: tuple[int, int], frames: int, form: Form, model: Model, grid_of: GridOf, seed: int = 0) -> Item:
    """A random image, or a clip if `frames` is not 0, of uint8 values; its shape is that of the grid if form is pixels.

    size: height and width.
    Raises ValueError for a JPEG if Pillow is not installed, and if the server does not prepare the modality.
    """
    modality: Modality = "video" if frames else "image"
    if modality not in model.prepared:
        what = "clips" if frames else "pictures"
        raise ValueError(
            f"--size: this server prepares no {what} of {model.model_type}, so that the grid of a size is not known"
        )
    if form == "jpeg":
        return Item(encoded=_jpeg(*size, seed))
    picture = Item(_random((frames, *size, 3) if frames else (*size, 3), seed), modality=modality)
    return picture if form == "picture" else item_of(grid_of(picture), modality, model, seed)


def item_of(grid: Grid, modality: Modality, model: Model, seed: int = 0) -> Item:
    """Random pixels of the shape that a processor returns for a grid, and crops if the model takes them."""
    if model.tiles is None:
        frames = model.temporal_patch_size if modality == "video" else 1
        shape = (math.prod(grid), model.channels * frames * model.patch_size**2)
        return Item(_random(shape, seed), grid, modality)
    tiles, crops = grid[0], 0
    if model.tiles.crop is not None:  # one tile shows the whole image
        tiles, crops = (grid[0], grid[0]) if model.tiles.single else (1, grid[0] - 1)
    pixels = _random((tiles, model.channels, *model.tiles.tile), seed)
    if not crops:
        return Item(pixels, grid, modality)
    assert model.tiles.crop is not None
    return Item(pixels, grid, modality, crops=_random((crops, model.channels, *model.tiles.crop), seed))


def _random(shape: tuple[int, ...], seed: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def _jpeg(height: int, width: int, seed: int) -> bytes:
    """A file with low frequencies and some noise, as a photograph has; noise alone would be several times as large."""
    try:
        from PIL import Image  # noqa: PLC0415  # only this form needs it
    except ImportError as error:
        raise ValueError("--as jpeg: Pillow is not installed: pip install pillow") from error
    coarse = _random((-(-height // _COARSE), -(-width // _COARSE), 3), seed)
    smooth = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC), np.int16)
    noise = np.random.default_rng((seed, 1)).integers(-_NOISE, _NOISE + 1, smooth.shape, np.int16)
    file = io.BytesIO()
    Image.fromarray(np.clip(smooth + noise, 0, 255).astype(np.uint8)).save(file, "JPEG", quality=90)
    return file.getvalue()
