"""Images and frames in memory as arrays of uint8."""

import os
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from vitwire._inputs.files import FileObject, ImageLike

Pixels = npt.NDArray[np.uint8]
Clip: TypeAlias = Pixels | Sequence[ImageLike]

_CHANNEL_COUNTS = (1, 3, 4)
_ALPHA = 4
"""Channels of a picture with transparency."""


@runtime_checkable
class PillowImage(Protocol):
    """The parts of PIL.Image.Image in use; Pillow itself is not imported."""

    info: dict[Any, Any]

    def getbands(self) -> tuple[str, ...]: ...

    def convert(self, mode: str, /) -> "PillowImage": ...


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
