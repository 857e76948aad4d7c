"""Encoded images: their size from the header, and their pixels. Runs in decoders only."""

from io import BytesIO
from struct import pack, unpack_from
from zlib import crc32

from msgspec.structs import replace
from PIL import Image
from PIL.ExifTags import Base

from vitwire_server.core.decoding import Fault
from vitwire_server.preparing import pillow
from vitwire_server.preparing.files.jpegs import is_plain
from vitwire_server.preparing.files.messages import Measured, NotDecoded
from vitwire_server.preparing.rules.forms import form_of
from vitwire_server.preparing.rules.patches import CHANNELS
from vitwire_server.preparing.rules.recipe import Recipe

_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
_FIRST_OF_MANY = ("GIF", "MPO")
"""Formats of which the first picture is used: animations, and photographs that a camera stores with others."""
_ORIENTATIONS = range(1, 9)
_TURNED = (5, 6, 7, 8)
"""Orientations of EXIF with width and height exchanged."""
_PNG_HEADER, _PNG_DATA, _PNG_METADATA = b"IHDR", b"IDAT", (b"eXIf", b"iTXt", b"tEXt", b"zTXt")
_PNG_START, _PNG_CONTENT, _PNG_OVERHEAD = 8, 8, 12


def measure(data: bytes, recipe: Recipe, max_pixels: int) -> Measured:
    """Form and cost of the prepared image. Raises NotDecoded, or what Pillow raises."""
    with BytesIO(data) as file, Image.open(file, formats=_FORMATS) as image:
        width, height = image.size
        if width * height > max_pixels:
            raise NotDecoded(Fault.TOO_LARGE, f"{width}x{height} exceeds the limit of {max_pixels} pixels")
        # in this order: `is_animated` reads a GIF's second picture, which may be damaged
        if image.format not in _FIRST_OF_MANY and getattr(image, "is_animated", False):
            raise NotDecoded(Fault.UNSUPPORTED, "is animated; send its frames as a clip")
        orientation = _orientation(image, data)
        if orientation in _TURNED:
            width, height = height, width
    picture = (height, width, CHANNELS)
    measured = Measured.of(form_of(picture, recipe), height * width, picture)
    return replace(measured, orientation=orientation, area=height * width) if is_plain(data) else measured


def decode(data: bytes, recipe: Recipe) -> Image.Image:
    """The image in RGB. Raises ValueError."""
    with BytesIO(data) as file:
        return pillow.read(file, recipe, _FORMATS)


def _orientation(image: Image.Image, data: bytes) -> int:
    """The orientation in the image's metadata, 1 to 8; a PNG may have it after the pixels."""
    if image.format == "PNG":
        with BytesIO(_without_pixels(data)) as file, Image.open(file, formats=("PNG",)) as headers:
            found = Image.Image.getexif(headers).get(Base.Orientation)
    else:
        found = image.getexif().get(Base.Orientation)
    return next((each for each in _ORIENTATIONS if each == found), 1)  # also for a fraction or float, as Pillow does


def _without_pixels(data: bytes) -> bytes:
    """A PNG's header and metadata, wherever they are, and pixels that end before they begin."""
    parts, at = [data[:_PNG_START]], _PNG_START
    while at + _PNG_OVERHEAD <= len(data):
        length, kind = unpack_from(">I4s", data, at)
        content = data[at + _PNG_CONTENT : at + _PNG_CONTENT + length]
        if kind == _PNG_HEADER or kind in _PNG_METADATA:
            parts.append(_chunk(kind, content))
        at += length + _PNG_OVERHEAD
    return b"".join([*parts, _chunk(_PNG_DATA, b"")])


def _chunk(kind: bytes, content: bytes) -> bytes:
    return pack(">I4s", len(content), kind) + content + pack(">I", crc32(kind + content))
