"""Files: of images, whose header is read in a worker, and regular ones on disk."""

import hashlib
import io
import os
import stat
from typing import NamedTuple

from PIL import Image, UnidentifiedImageError

from vitwire.wire import Buffer
from vitwire_gateway.api_errors import ApiError

_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
"""The only ones that are tried on what callers send."""


class ImageFile(NamedTuple):
    """The bytes of an image file, and their SHA-256."""

    content: bytes
    digest: bytes

    @classmethod
    def of(cls, content: Buffer) -> "ImageFile":
        """The file with these bytes."""
        return cls(bytes(content), hashlib.sha256(content).digest())


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


def opened_regular(path: str, flags: int) -> int:
    """For `open(opener=)`: the descriptor of a regular file. Raises OSError for any other, and never blocks."""
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError("not a regular file")
    return descriptor
