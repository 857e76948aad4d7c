"""Files: of images, whose header is read in a worker, and of clips."""

import hashlib
import io
from typing import NamedTuple

from PIL import Image, UnidentifiedImageError

from vitwire import ProcessorOptions
from vitwire.items import Modality
from vitwire.shared.file_kinds import CLIPS, NOT_AN_IMAGE, NOT_HEIC, kind_of
from vitwire.wire import Buffer
from vitwire_children.picture_formats import FORMATS
from vitwire_gateway.api_errors import ApiError

_MEDIA_TYPES = {
    "MPO": "image/jpeg", "JPEG2000": "image/jp2", "ICO": "image/x-icon", "avi": "video/x-msvideo",
    "mpeg_ts": "video/mp2t",
}  # fmt: skip
"""Of formats that are named otherwise there; MPO is a camera's JPEG with further pictures."""


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
        with Image.open(io.BytesIO(content), formats=FORMATS) as opened:
            (width, height), kind = opened.size, opened.format or ""
    except UnidentifiedImageError as error:
        reason = NOT_HEIC if kind_of(content) == "heic" else NOT_AN_IMAGE
        raise ApiError(400, reason) from error
    except MemoryError as error:
        raise ApiError(400, "reading it takes more memory than allowed") from error
    except Exception as error:  # libraries raise anything over broken files
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ApiError(400, f"cannot be read as an image: {reason}") from error
    if width * height > max_pixels:
        raise ApiError(400, f"{width}x{height} exceeds the limit of {max_pixels} pixels (--max-image-pixels)")
    return Header(kind, width * height)


def media_type_of(kind: str, modality: Modality) -> str:
    """The media type of a format."""
    return _MEDIA_TYPES.get(kind, f"{modality}/{kind.lower()}")


def clip_kind(content: bytes) -> str:
    """The format of a clip, by the first bytes of its file. Raises ApiError for other files."""
    if (kind := kind_of(content)) in CLIPS:
        return str(kind)
    raise ApiError(400, "neither an MP4, WebM, AVI nor MPEG-TS file")
