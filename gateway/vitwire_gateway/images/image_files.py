"""Files: of images, whose header is read in a worker, and of clips."""

import hashlib
import io
from typing import NamedTuple

from PIL import Image, MpoImagePlugin, UnidentifiedImageError, WebPImagePlugin  # noqa: F401 - workers cannot import

from vitwire import ProcessorOptions
from vitwire.items import Modality
from vitwire.wire import Buffer
from vitwire_gateway.api_errors import ApiError

Image.preinit()
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
"""The only ones that are tried on what callers send."""
_CLIPS = {"mp4": (4, b"ftyp"), "webm": (0, b"\x1a\x45\xdf\xa3")}
"""Offset and first bytes of the files of clips that encoders decode."""


class ImageFile(NamedTuple):
    """The bytes of the file of an image or a clip, and a digest of them."""

    content: bytes
    digest: bytes
    modality: Modality = "image"
    options: ProcessorOptions | None = None

    @classmethod
    def of(cls, content: Buffer, modality: Modality = "image", options: ProcessorOptions | None = None) -> "ImageFile":
        digest = hashlib.sha256(content).digest()
        if modality == "video":  # sent as an image too, the same bytes are other content
            digest = hashlib.sha256(b"video" + digest).digest()
        return cls(bytes(content), digest, modality, options if modality == "image" else None)


class Header(NamedTuple):
    """Format and size of an image, from the first bytes of its file."""

    kind: str
    """Pillow's name of the format."""
    pixels: int


def header_of(content: bytes, max_pixels: int) -> Header:
    """The header of an image file. Raises ApiError for other files and for too many pixels. Call it in a worker."""
    try:
        with Image.open(io.BytesIO(content), formats=_FORMATS) as opened:
            (width, height), kind = opened.size, opened.format or ""
    except UnidentifiedImageError as error:
        raise ApiError(400, "not a JPEG, PNG, WebP, GIF or BMP image") from error
    except MemoryError as error:
        raise ApiError(400, "reading it takes more memory than allowed") from error
    except Exception as error:  # libraries raise anything over broken files
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ApiError(400, f"cannot be read as an image: {reason}") from error
    if width * height > max_pixels:
        raise ApiError(400, f"{width}x{height} exceeds the limit of {max_pixels} pixels")
    return Header(kind, width * height)


def clip_kind(content: bytes) -> str:
    """`mp4` or `webm`, by the first bytes of a clip's file. Raises ApiError for other files."""
    for kind, (at, mark) in _CLIPS.items():
        if content.startswith(mark, at):
            return kind
    raise ApiError(400, "neither an MP4 nor a WebM file")
