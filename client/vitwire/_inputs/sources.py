"""Sources of images and clips: files, and pictures in memory."""

import io
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from vitwire.shared.data_uris import NO_HEAD, decoded, is_bare, payload_of

if TYPE_CHECKING:
    from PIL.Image import Image

Picture = npt.NDArray[np.uint8]


@runtime_checkable
class FileObject(Protocol):
    """A file that is open in binary mode, or anything else that is read like one."""

    def read(self, size: int, /) -> bytes: ...


FileLike: TypeAlias = "str | os.PathLike[str] | bytes | bytearray | memoryview | FileObject"
"""A path, a `data:` URI, the bytes of a file, or a file object."""
Loaded: TypeAlias = "str | os.PathLike[str] | bytes | Image | Picture"
ImageLike: TypeAlias = "FileLike | Image | Picture"
Clip: TypeAlias = Picture | Sequence[ImageLike]

MAX_BYTES = 256 << 20
"""Largest file object or `data:` URI that is read."""
_URL = re.compile(r"(https?|ftps?|s3|gs|file):/", re.IGNORECASE)
_CHUNK = 1 << 20
_SHOWN = 80
_CHANNEL_COUNTS = (1, 3, 4)
_ALPHA = 4
"""Channels of a picture with transparency."""
_ORIENTATION = 0x0112
"""The tag of EXIF."""
_TRANSPOSITIONS: dict[Any, int] = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}
"""Pillow's numbers of the transpositions that turn an image upright, by its orientation."""


def loaded(source: ImageLike) -> Loaded:
    """The source as a path, the bytes of a file, or a picture in memory.

    File objects are read to their end, from their start if they can seek. Raises ValueError for a URL, an invalid
    `data:` URI and more than `MAX_BYTES`, TypeError for a file in text mode, and OSError.
    """
    if isinstance(source, bytearray | memoryview):
        return bytes(source)
    if isinstance(source, str) and source[:5].lower() == "data:":
        return _of_data_uri(source)
    if isinstance(source, str | os.PathLike) and is_url(source):
        if str(source)[:5].lower() == "file:":
            raise ValueError(f"{str(source)[:_SHOWN]} is a file: URL: pass the path")
        raise ValueError(
            f"{str(source)[:_SHOWN]} is a URL. The client fetches none: otherwise anyone who names an image could "
            "choose what this host connects to. Fetch it with httpx or requests and pass the bytes, or use "
            "`vitwire router`."
        )
    if isinstance(source, FileObject):
        return _of_file_object(source)
    return source


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether it names something on a network; paths lose one of the slashes."""
    return _URL.match(str(path)) is not None


def file_bytes(source: FileLike) -> bytes:
    """The bytes of a file. Raises as `loaded`, and TypeError for a picture in memory."""
    found = loaded(source)
    if isinstance(found, str | os.PathLike):
        try:
            return Path(found).read_bytes()
        except OSError as error:
            if is_bare(str(found)):
                raise ValueError(f"{str(found)[:_SHOWN]!r} {NO_HEAD}, or pass the bytes") from error
            raise
    if not isinstance(found, bytes):
        raise TypeError(f"expected a path, bytes, a data: URI or a file object, got {type(found).__name__}")
    return found


def _of_file_object(file: FileObject) -> bytes:
    if isinstance(file, io.TextIOBase):
        raise TypeError("the file is open in text mode: open it in binary mode ('rb')")
    if hasattr(file, "seekable") and file.seekable():
        file.seek(0)  # type: ignore[attr-defined]  # files that are seekable have it
    content = bytearray()
    while chunk := file.read(_CHUNK):
        if not isinstance(chunk, bytes | bytearray | memoryview):
            raise TypeError(f"read() of the file returned {type(chunk).__name__}: expected bytes, as of a file in 'rb'")
        content += chunk
        if len(content) > MAX_BYTES:
            raise ValueError(f"the file object has more than {MAX_BYTES} bytes: pass a path")
    if chunk is None:
        raise ValueError("the file object is in non-blocking mode and has no bytes yet")
    return bytes(content)


def _of_data_uri(uri: str) -> bytes:
    if len(uri) > 2 * MAX_BYTES:
        raise ValueError(f"the data: URI has more than {2 * MAX_BYTES} characters: pass the bytes")
    content = decoded(payload_of(uri))
    if len(content) > MAX_BYTES:
        raise ValueError(f"the data: URI has more than {MAX_BYTES} bytes: pass the bytes")
    return content


@runtime_checkable
class PillowImage(Protocol):
    """The parts of PIL.Image.Image in use; Pillow itself is not imported."""

    info: dict[Any, Any]

    def getbands(self) -> tuple[str, ...]: ...

    def convert(self, mode: str, /) -> "PillowImage": ...

    def getexif(self) -> Mapping[int, Any]: ...

    def transpose(self, method: Any, /) -> "PillowImage": ...  # noqa: ANN401  # of an enum of Pillow


def pixels_of(image: object) -> Picture:
    """A picture `(H, W, 3)`, or `(H, W, 4)` with alpha, of a Pillow image or a uint8 array.

    An image is turned as its EXIF orientation says. Arrays are `(H, W)`, `(H, W, C)` or `(C, H, W)` with 1, 3 or 4
    channels; an ambiguous shape is read as channels first, and they stay views. Raises ValueError or TypeError.
    """
    if isinstance(image, np.ndarray):
        return _of_array(image)
    if not isinstance(image, PillowImage):
        raise TypeError(f"expected a Pillow image or a uint8 array, got {type(image).__name__}")
    has_alpha = "A" in image.getbands() or "a" in image.getbands() or image.info.get("transparency") is not None
    try:
        picture = image.convert("RGBA" if has_alpha else "RGB")
        transposition = _TRANSPOSITIONS.get(image.getexif().get(_ORIENTATION))
        return np.asarray(picture if transposition is None else picture.transpose(transposition))
    except (
        OSError,
        ValueError,
        SyntaxError,
        EOFError,
        LookupError,
        RuntimeError,
    ) as error:  # of a file that is read only now
        raise ValueError(f"the image cannot be read: {error}") from error


def pixels_of_frames(frames: Clip) -> Picture:
    """The frames `(F, H, W, 3)` of a clip, or 4 channels if any has alpha. Raises ValueError or TypeError."""
    if not isinstance(frames, np.ndarray | Sequence) or isinstance(frames, str):
        kind = type(frames).__name__
        raise TypeError(f"expected an array or a sequence of frames, got {kind}; Item.from_file takes a clip's file")
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


def _of_frame(index: int, frame: object) -> Picture:
    if isinstance(frame, str | os.PathLike | bytes | bytearray | memoryview | FileObject):
        raise TypeError(f"frame {index} is a file: open it with Pillow, or send the whole clip by Item.from_file")
    try:
        return pixels_of(frame)
    except ValueError as error:
        raise ValueError(f"frame {index}: {error}") from error


def _with_alpha(picture: Picture) -> Picture:
    if picture.shape[-1] == _ALPHA:
        return picture
    return np.dstack([picture, np.full(picture.shape[:2], 255, np.uint8)])


def _of_array(image: Picture) -> Picture:
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
