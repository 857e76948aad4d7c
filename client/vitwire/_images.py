"""Images and clips to patches or tiles, equal to those of the model's Hugging Face processor.

Pixels stay uint8: the server rescales and normalises them on its device. Pillow is needed for files, Pillow images
and resizing (the extra `images`).
"""

import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import IO, TYPE_CHECKING, TypeAlias

import numpy as np

from vitwire._patches import MAX_DECODED_PIXELS, Grid, Pixels, Preprocessor, Size, patch_rows, smart_resize
from vitwire._pictures import Picture, Tiles
from vitwire._sizes import resized
from vitwire._sources import ImageLike, loaded
from vitwire._tiles import Tiling, cut
from vitwire.extras import remedy

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = [
    "MAX_DECODED_PIXELS",
    "ImageLike",
    "Preprocessor",
    "Tiling",
    "clip_patches",
    "clip_tiles",
    "image_patches",
    "image_tiles",
    "read_image",
    "smart_resize",
]

_Picture: TypeAlias = "Image | Pixels"

_CHANNEL_COUNTS = (1, 3, 4)
# What Pillow raises for truncated, damaged or invalid files; Warning if warnings are errors.
_UNREADABLE = (
    OSError, ValueError, SyntaxError, EOFError, LookupError, TypeError, RuntimeError, Warning, struct.error,
    zlib.error,
)  # fmt: skip


def image_patches(image: ImageLike, settings: Preprocessor) -> tuple[Pixels, Grid]:
    """Patches `(h*w, C*p*p)` of one image, and its grid `(1, h, w)`.

    `image` is a path, a `data:` URI, the bytes of a file, a file object, a Pillow image or a uint8 array `(H, W)`,
    `(H, W, C)` or `(C, H, W)` with 1, 3 or 4 channels. The frame axis, along which the processor only duplicates the
    image, is omitted.
    Raises ValueError for invalid or empty images, and OSError for a file that cannot be opened.
    """
    picture = _rgb(image, drop=settings.drops_transparency)
    size = resized(*_size(picture), settings, settings.temporal_patch_size)
    return patch_rows([_resized(picture, size, settings.resample)], size, (1, 1), settings)


def clip_patches(frames: Pixels | Sequence[ImageLike], settings: Preprocessor) -> tuple[Pixels, Grid]:
    """Patches `(t*h*w, C*T*p*p)` of one clip, and its grid `(t, h, w)`, t = ceil(F / T).

    `frames` is a uint8 array `(F, H, W, 3)` or a sequence of images of one size, in order. All frames are
    used; the last is repeated until T divides their number. Raises as `image_patches` does.
    """
    pictures = _frames(frames, drop=settings.drops_transparency)
    first = next(pictures)
    size = resized(*_size(first), settings, len(frames))
    alike = _of_one_size(chain([first], pictures), _size(first))
    frames_at_size = (_resized(picture, size, settings.resample) for picture in alike)
    slots = (-(-len(frames) // settings.temporal_patch_size), settings.temporal_patch_size)
    return patch_rows(frames_at_size, size, slots, settings)


def image_tiles(image: ImageLike, settings: Preprocessor, tiling: Tiling) -> Tiles:
    """Tiles `(tiles, 3, H, W)` of one image, its grid `(tiles, rows, columns)`, and its crops, if any.

    Raises as `image_patches` does.
    """
    return _cut(_rgb(image, drop=settings.drops_transparency), settings, tiling)


def clip_tiles(frames: Pixels | Sequence[ImageLike], settings: Preprocessor, tiling: Tiling) -> Tiles:
    """One tile `(3, H, W)` for each frame of a clip, and its grid `(frames, 1, 1)`. Raises as `clip_patches` does."""
    pictures = _frames(frames, drop=settings.drops_transparency)
    first = next(pictures)
    alike = _of_one_size(chain([first], pictures), _size(first))
    tiles = [_cut(picture, settings, tiling).pixels for picture in alike]
    return Tiles(np.concatenate(tiles), (len(tiles), 1, 1))


def _cut(picture: _Picture, settings: Preprocessor, tiling: Tiling) -> Tiles:
    pixels = np.asarray(picture)
    return cut(Picture(_size(pixels), pixels, _resized, settings.resample), tiling)


def _frames(frames: Pixels | Sequence[ImageLike], *, drop: bool) -> Iterator[_Picture]:
    """The frames of a clip in RGB, at least one."""
    if not isinstance(frames, np.ndarray | Sequence) or isinstance(frames, str):
        raise TypeError(f"expected an array or a sequence of frames, got {type(frames).__name__}")
    if isinstance(frames, np.ndarray) and frames.ndim != 4:
        raise ValueError(f"expected frames of shape (F, H, W, 3), got {frames.shape}")
    if len(frames) == 0:
        raise ValueError("expected at least one frame, got none")
    return (_rgb(frame, drop=drop) for frame in frames)


def _of_one_size(pictures: Iterable[_Picture], size: Size) -> Iterator[_Picture]:
    for index, picture in enumerate(pictures):
        if _size(picture) != size:
            raise ValueError(f"expected frames of one size, got {size} and, at {index}, {_size(picture)}")
        yield picture


# -- reading ---------------------------------------------------------------------------------------


def _rgb(image: ImageLike, *, drop: bool) -> _Picture:
    """`image` in RGB, on a white background unless transparency is to `drop`; arrays stay views if possible."""
    image = loaded(image)
    if isinstance(image, np.ndarray):
        return _rgb_array(image, drop=drop)
    if isinstance(image, bytes):
        return read_image(BytesIO(image), "the file", drop=drop)
    if isinstance(image, str | os.PathLike):
        with Path(image).open("rb") as file:
            return read_image(file, str(image), drop=drop)
    if not isinstance(image, _pillow().Image):
        raise TypeError(
            f"expected a path, bytes, a file object, a Pillow image or a uint8 array, got {type(image).__name__}"
        )
    with _decoding("the image"):
        return _rgb_image(image, drop=drop)


def _rgb_array(image: Pixels, *, drop: bool) -> Pixels:
    """An (H, W, 3) view or copy of an array; an ambiguous shape is read as channels first."""
    if image.dtype != np.uint8:
        raise ValueError(f"expected an array of uint8, values 0 to 255, got {image.dtype}")
    shape = image.shape
    if image.ndim == 2:
        image = image[..., None]
    elif image.ndim == 3 and shape[0] in _CHANNEL_COUNTS:
        image = np.moveaxis(image, 0, -1)
    if image.ndim != 3 or image.shape[-1] not in _CHANNEL_COUNTS or image.size == 0:
        raise ValueError(f"expected an image (H, W), (H, W, C) or (C, H, W) of 1, 3 or 4 channels, got {shape}")
    if image.shape[-1] == 4:
        return image[..., :3] if drop else _array_on_white(image)
    return np.broadcast_to(image, (*image.shape[:2], 3))


def _array_on_white(image: Pixels) -> Pixels:
    alpha = image[..., 3:].astype(np.uint16)
    blend = alpha * image[..., :3] + (255 - alpha) * 255
    return ((blend + 127) // 255).astype(np.uint8)  # at most 65152; never halfway between two values


def read_image(file: IO[bytes], name: str, *, drop: bool, formats: Sequence[str] | None = None) -> "Image":
    """The image in a file as Hugging Face loads it: rotated by EXIF, alpha ignored, a transparent colour applied.

    formats: the formats that are accepted, by Pillow's names; by default all. Raises ValueError with the name.
    """
    pillow = _pillow()
    from PIL import ImageOps  # noqa: PLC0415  # as optional as Pillow

    with _decoding(name):
        image: Image = pillow.open(file, formats=formats)
        _check_bounded(image)
        ImageOps.exif_transpose(image, in_place=True)
        if isinstance(image.info.get("transparency"), bytes):
            del image.info["transparency"]  # the conversion drops it too, but with a warning
        return _rgb_image(image.convert("RGB"), drop=drop)


def _rgb_image(image: "Image", *, drop: bool) -> "Image":
    _check_bounded(image)
    if not drop and ("A" in image.getbands() or image.info.get("transparency") is not None):
        image = image.convert("RGBA")
        ground = _pillow().new("RGBA", image.size, (255, 255, 255, 255))
        image = _pillow().alpha_composite(ground, image)
    image.load()
    return image if image.mode == "RGB" else image.convert("RGB")


def _check_bounded(image: "Image") -> None:
    if image.format == "EPS":
        raise ValueError("EPS is not supported: Pillow would run it as a program in Ghostscript")
    if image.width * image.height > MAX_DECODED_PIXELS:
        raise ValueError(f"{image.width}x{image.height} exceeds the limit of {MAX_DECODED_PIXELS} pixels")


@contextmanager
def _decoding(name: str) -> Iterator[None]:
    """Turn any error of Pillow for a bad image into a ValueError with its name."""
    pillow = _pillow()
    try:
        yield
    except (*_UNREADABLE, pillow.DecompressionBombError) as error:
        raise ValueError(f"{name} cannot be read as an image: {error}") from error


# -- resizing --------------------------------------------------------------------------------------


def _size(picture: _Picture) -> Size:
    if isinstance(picture, np.ndarray):
        return picture.shape[0], picture.shape[1]
    return picture.height, picture.width


def _resized(picture: _Picture, size: Size, resample: int) -> Pixels:
    """An (H, W, 3) array of the picture at `size`; the same array if it has that size."""
    if _size(picture) == size:
        return np.asarray(picture)
    image: Image = _pillow().fromarray(picture) if isinstance(picture, np.ndarray) else picture
    return np.asarray(image.resize((size[1], size[0]), resample))


def _pillow() -> ModuleType:
    try:
        from PIL import Image  # noqa: PLC0415  # optional
    except ImportError as error:
        reason = f"reading and resizing images needs Pillow; {remedy('images')}"
        raise ImportError(reason, name="PIL") from error
    return Image
