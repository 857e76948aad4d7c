"""Images and clips to items: files as they are, and pictures in memory. The server prepares both."""

import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt

from vitwire._inputs.encodings import encoding_of
from vitwire._inputs.sources import FileObject, ImageLike, Loaded, file_bytes, loaded
from vitwire.errors import EncodeFailed, InvalidItem
from vitwire.items import Item, Modality
from vitwire.model import Model

Pixels = npt.NDArray[np.uint8]
Clip: TypeAlias = Pixels | Sequence[ImageLike]
S = TypeVar("S")
T = TypeVar("T")

_CHANNEL_COUNTS = (1, 3, 4)
_ALPHA = 4
"""Channels of a picture with transparency."""


@runtime_checkable
class PillowImage(Protocol):
    """The parts of PIL.Image.Image in use; Pillow itself is not imported."""

    info: dict[Any, Any]

    def getbands(self) -> tuple[str, ...]: ...

    def convert(self, mode: str, /) -> "PillowImage": ...


def image_items(images: Sequence[ImageLike], model: Model) -> list[Item]:
    """One item per image: a file as it is, or a picture. Raises InvalidItem for one that cannot be used, or OSError."""
    _check_prepared(model, "image")
    _check_list(images, "images", dimensions=3)
    return [_indexed(lambda image: _item(loaded(image), model), index, image) for index, image in enumerate(images)]


def clip_items(clips: Sequence[Clip], model: Model) -> list[Item]:
    """One item per clip, its frames in one array. Raises InvalidItem for one that cannot be used."""
    _check_prepared(model, "video")
    _check_list(clips, "clips", dimensions=4)
    return [_indexed(lambda clip: Item(pixels_of_frames(clip), modality="video"), *each) for each in enumerate(clips)]


def pixels_of(image: object) -> Pixels:
    """A picture `(H, W, 3)`, or `(H, W, 4)` with alpha, of a Pillow image or a uint8 array.

    Arrays are `(H, W)`, `(H, W, C)` or `(C, H, W)` with 1, 3 or 4 channels; an ambiguous shape is read as channels
    first, and they stay views. Raises ValueError or TypeError.
    """
    if isinstance(image, np.ndarray):
        return _of_array(image)
    if not isinstance(image, PillowImage):
        raise TypeError(f"expected a Pillow image or a uint8 array, got {type(image).__name__}")
    has_alpha = "A" in image.getbands() or "a" in image.getbands() or image.info.get("transparency") is not None
    try:
        return np.asarray(image.convert("RGBA" if has_alpha else "RGB"))
    except (
        OSError,
        ValueError,
        SyntaxError,
        EOFError,
        LookupError,
        RuntimeError,
    ) as error:  # of a file that is read only now
        raise ValueError(f"the image cannot be read: {error}") from error


def pixels_of_frames(frames: Clip) -> Pixels:
    """The frames `(F, H, W, 3)` of a clip, or 4 channels if any has alpha. Raises ValueError or TypeError."""
    if not isinstance(frames, np.ndarray | Sequence) or isinstance(frames, str):
        raise TypeError(f"expected an array or a sequence of frames, got {type(frames).__name__}")
    if isinstance(frames, np.ndarray) and frames.ndim != 4:
        raise ValueError(f"expected frames of shape (F, H, W, 3), got {frames.shape}")
    if len(frames) == 0:
        raise ValueError("expected at least one frame, got none")
    if isinstance(frames, np.ndarray) and frames.dtype == np.uint8 and frames.shape[-1] in (3, _ALPHA):
        return frames
    pictures = [_of_frame(index, frame) for index, frame in enumerate(frames)]
    for index, picture in enumerate(pictures):
        if picture.shape[:2] != pictures[0].shape[:2]:
            sizes = f"{pictures[0].shape[:2]} and, at {index}, {picture.shape[:2]}"
            raise ValueError(f"expected frames of one size, got {sizes}")
    if len({picture.shape[-1] for picture in pictures}) > 1:
        pictures = [_with_alpha(picture) for picture in pictures]
    return np.stack(pictures)


def _of_frame(index: int, frame: object) -> Pixels:
    if isinstance(frame, str | os.PathLike | bytes | bytearray | memoryview | FileObject):
        raise TypeError(f"frame {index} is a file: open it with Pillow, or send the whole clip by Item.from_file")
    try:
        return pixels_of(frame)
    except ValueError as error:
        raise ValueError(f"frame {index}: {error}") from error


def _with_alpha(picture: Pixels) -> Pixels:
    if picture.shape[-1] == _ALPHA:
        return picture
    return np.dstack([picture, np.full(picture.shape[:2], 255, np.uint8)])


def _of_array(image: Pixels) -> Pixels:
    if image.dtype != np.uint8:
        raise ValueError(f"expected an array of uint8, values 0 to 255, got {image.dtype}")
    shape = image.shape
    if image.ndim == 2:
        image = image[..., None]
    elif image.ndim == 3 and shape[0] in _CHANNEL_COUNTS:
        image = np.moveaxis(image, 0, -1)
    if image.ndim != 3 or image.shape[-1] not in _CHANNEL_COUNTS or image.size == 0:
        raise ValueError(f"expected an image (H, W), (H, W, C) or (C, H, W) of 1, 3 or 4 channels, got {shape}")
    return image if image.shape[-1] > 1 else np.broadcast_to(image, (*image.shape[:2], 3))


def _item(source: Loaded, model: Model) -> Item:
    if not isinstance(source, str | bytes | os.PathLike):
        return Item(pixels_of(source))
    data = file_bytes(source)
    kind, accepted = encoding_of(data), ", ".join(model.encodings)
    if kind not in model.encodings:
        advice = "open it with Pillow and pass the image"
        raise ValueError(f"the file's format is {kind or 'unknown'}, the server decodes {accepted}: {advice}")
    if len(data) > model.limits.encoded_bytes:
        raise ValueError(f"the file has {len(data)} bytes, the server takes at most {model.limits.encoded_bytes}")
    return Item(encoded=data)


def _check_list(sources: object, what: str, *, dimensions: int) -> None:
    """Raises TypeError for a single image or clip, which would be iterated over as if it were a list."""
    alone = isinstance(sources, np.ndarray) and sources.ndim <= dimensions
    single = isinstance(sources, str | bytes | bytearray | memoryview | os.PathLike)
    if alone or single or isinstance(sources, PillowImage | FileObject):
        raise TypeError(f"expected a list of {what}, got a single {type(sources).__name__}")


def _check_prepared(model: Model, modality: Modality) -> None:
    if modality not in model.prepared:
        raise EncodeFailed(
            f"the server prepares no {modality}s for {model.model_type}: it runs with --decode-processes 0, or the "
            "model takes none, or only as its own processor returns them (encode_batch)",
            code="UNIMPLEMENTED",
        )


def _indexed(make: Callable[[S], T], index: int, source: S) -> T:
    """Raises InvalidItem, with the position, for a source that cannot be used."""
    try:
        return make(source)
    except (ValueError, TypeError) as error:
        raise InvalidItem(str(error), item=index) from error
