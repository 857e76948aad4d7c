"""Images and clips to items, in a few threads: Pillow and numpy release the GIL for most of the work."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

from vitwire import preparation
from vitwire._errors import EncodeFailed, InvalidItem
from vitwire._images import Preprocessor
from vitwire._items import Item, Modality
from vitwire._model import Model
from vitwire._tiles import Tiles

if TYPE_CHECKING:
    from PIL.Image import Image

    ImageLike = str | os.PathLike[str] | bytes | Image | npt.NDArray[np.uint8]
    Clip = npt.NDArray[np.uint8] | Sequence[ImageLike]

S = TypeVar("S")

_MAX_THREADS = 8


def image_items(images: "Sequence[ImageLike]", model: Model) -> list[Item]:
    """One item per image, its pixels uint8 patches. Raises InvalidItem for one that cannot be used."""
    settings = _settings(model.image_preprocessor, "images")
    _check_list(images, "images", dimensions=3)
    return _items(images, lambda source: preparation.image(source, settings), "image")


def clip_items(clips: "Sequence[Clip]", model: Model) -> list[Item]:
    """One item per clip, its pixels uint8 patches. Raises InvalidItem for one that cannot be used."""
    settings = _settings(model.video_preprocessor, "clips")
    _check_list(clips, "clips", dimensions=4)
    return _items(clips, lambda frames: preparation.clip(frames, settings), "video")


def _check_list(sources: object, what: str, *, dimensions: int) -> None:
    """Raises TypeError for a single image or clip, which would be iterated over as if it were a list."""
    alone = isinstance(sources, np.ndarray) and sources.ndim <= dimensions
    if alone or isinstance(sources, str | bytes | os.PathLike) or hasattr(sources, "getbands"):
        raise TypeError(f"expected a list of {what}, got a single {type(sources).__name__}")


def _settings(settings: Preprocessor | None, what: str) -> Preprocessor:
    if settings is None:
        raise EncodeFailed(f"the server's model has no settings to prepare {what}", code="UNIMPLEMENTED")
    return settings


def _items(sources: Sequence[S], cut: Callable[[S], Tiles], modality: Modality) -> list[Item]:
    def item(index: int, source: S) -> Item:
        try:
            parts = cut(source)
        except (ValueError, TypeError) as error:
            raise InvalidItem(str(error), item=index) from error
        return Item(parts.pixels, parts.grid, modality, crops=parts.crops)

    positions = range(len(sources))
    if len(sources) < 2:
        return list(map(item, positions, sources))
    with ThreadPoolExecutor(min(_MAX_THREADS, len(sources), os.cpu_count() or 1)) as pool:
        return list(pool.map(item, positions, sources))
