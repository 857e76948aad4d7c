"""Images and clips to items, in a few threads: Pillow and numpy release the GIL for most of the work."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from vitwire import preparation
from vitwire._encodings import encoding_of
from vitwire._errors import EncodeFailed, InvalidItem
from vitwire._images import Preprocessor
from vitwire._items import Item, Modality
from vitwire._model import Model
from vitwire._pictures import Tiles
from vitwire._sources import FileObject, ImageLike, Loaded, file_bytes, loaded

Clip: TypeAlias = npt.NDArray[np.uint8] | Sequence[ImageLike]
S = TypeVar("S")
T = TypeVar("T")

Upload = Literal["pixels", "encoded", "auto"]
UPLOADS: tuple[Upload, ...] = ("pixels", "encoded", "auto")
_MAX_THREADS = 8


def image_items(images: Sequence[ImageLike], model: Model, upload: Upload = "pixels") -> list[Item]:
    """One item per image, its pixels uint8 patches, or its file. Raises InvalidItem for one that cannot be used.

    upload: "pixels", "encoded" for files that the server decodes, or "auto" for these where the server accepts them.
    """
    if upload not in UPLOADS:
        raise ValueError(f"upload must be one of {', '.join(UPLOADS)}, got {upload!r}")
    settings = _settings(model, model.image_preprocessor, "images")
    _check_list(images, "images", dimensions=3)
    # File objects are read in this thread, one after the other, as two images may share one.
    sources = [_indexed(loaded, index, image) for index, image in enumerate(images)]

    def item(source: Loaded) -> Item:
        encoded = None if upload == "pixels" else _encoded(source, model, required=upload == "encoded")
        return encoded or _prepared(preparation.image(source, settings), "image")

    return _items(sources, item)


def clip_items(clips: Sequence[Clip], model: Model) -> list[Item]:
    """One item per clip, its pixels uint8 patches. Raises InvalidItem for one that cannot be used."""
    settings = _settings(model, model.video_preprocessor, "clips")
    _check_list(clips, "clips", dimensions=4)
    return _items(clips, lambda frames: _prepared(preparation.clip(frames, settings), "video"))


def _prepared(parts: Tiles, modality: Modality) -> Item:
    return Item(parts.pixels, parts.grid, modality, crops=parts.crops)


def _encoded(source: Loaded, model: Model, *, required: bool) -> Item | None:
    """An item with the bytes of a file; None for a source that the server does not decode.

    Raises ValueError for that if it is required, and OSError.
    """
    if not isinstance(source, str | bytes | os.PathLike) or not (model.encodings or required):
        if required:
            raise ValueError(f"upload='encoded' needs paths, bytes or file objects, got {type(source).__name__}")
        return None
    data = file_bytes(source)
    kind = encoding_of(data)
    if kind in model.encodings and len(data) <= model.limits.encoded_bytes:
        return Item(encoded=data)
    if required:
        accepted = ", ".join(model.encodings) or "nothing"
        raise ValueError(
            f"a file of {len(data)} bytes, format {kind or 'unknown'}; the server decodes {accepted} up to "
            f"{model.limits.encoded_bytes} bytes"
        )
    return None


def _check_list(sources: object, what: str, *, dimensions: int) -> None:
    """Raises TypeError for a single image or clip, which would be iterated over as if it were a list."""
    alone = isinstance(sources, np.ndarray) and sources.ndim <= dimensions
    single = isinstance(sources, str | bytes | bytearray | memoryview | os.PathLike)
    if alone or single or hasattr(sources, "getbands") or isinstance(sources, FileObject):
        raise TypeError(f"expected a list of {what}, got a single {type(sources).__name__}")


def _settings(model: Model, settings: Preprocessor | None, what: str) -> Preprocessor:
    if settings is None:
        raise EncodeFailed(
            f"{model.model_type}, the server's model, has no settings to prepare {what}: it takes none, or only pixels "
            "as its own processor emits them (encode_batch)",
            code="UNIMPLEMENTED",
        )
    return settings


def _items(sources: Sequence[S], make: Callable[[S], Item]) -> list[Item]:
    """Raises InvalidItem, with the position, for a source that cannot be used."""
    if len(sources) < 2:
        return [_indexed(make, index, source) for index, source in enumerate(sources)]
    with ThreadPoolExecutor(min(_MAX_THREADS, len(sources), os.cpu_count() or 1)) as pool:
        return list(pool.map(lambda index, source: _indexed(make, index, source), range(len(sources)), sources))


def _indexed(make: Callable[[S], T], index: int, source: S) -> T:
    try:
        return make(source)
    except (ValueError, TypeError) as error:
        raise InvalidItem(str(error), item=index) from error
