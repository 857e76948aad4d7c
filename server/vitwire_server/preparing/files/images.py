"""Encoded images: their size from the header, and their pixels. Runs in decoders only."""

from collections.abc import Iterator
from io import BytesIO
from struct import pack, unpack_from
from zlib import crc32

from msgspec.structs import replace
from PIL import AvifImagePlugin, Image, UnidentifiedImageError
from PIL.ExifTags import Base

from vitwire.shared.file_kinds import NOT_AN_IMAGE, NOT_HEIC, kind_of
from vitwire_children.picture_formats import FORMATS
from vitwire_children.serving import Fault, NotDone
from vitwire_server.preparing import pillow
from vitwire_server.preparing.files.messages import Measured
from vitwire_server.preparing.rules.forms import form_of
from vitwire_server.preparing.rules.patches import CHANNELS
from vitwire_server.preparing.rules.recipe import Recipe

_ORIENTATIONS = range(1, 9)
_TURNED = (5, 6, 7, 8)
"""Orientations of EXIF with width and height exchanged."""
_PNG_HEADER, _PNG_DATA, _PNG_METADATA = b"IHDR", b"IDAT", (b"eXIf", b"iTXt", b"tEXt", b"zTXt")
_PNG_START, _PNG_CONTENT, _PNG_OVERHEAD = 8, 8, 12


def too_large(max_pixels: int, what: str = "the picture") -> str:
    """The error that names the server's setting."""
    return f"{what} exceeds the limit of {max_pixels} pixels (--max-image-pixels)"


def measure(data: bytes, recipe: Recipe, max_pixels: int) -> Measured:
    """Form and cost of the prepared image. Raises NotDone, or what Pillow raises."""
    with BytesIO(data) as file, _opened(file, data) as image:
        width, height = image.size
        if width * height > max_pixels:
            raise NotDone(Fault.TOO_LARGE, too_large(max_pixels, f"{width}x{height}"))
        orientation = _orientation(image, data)
        if orientation in _TURNED:
            width, height = height, width
    picture = (height, width, CHANNELS)
    measured = Measured.of(form_of(picture, recipe), height * width, picture)
    return replace(measured, orientation=orientation, area=height * width) if is_plain(data) else measured


def decode(data: bytes, recipe: Recipe) -> Image.Image:
    """The image in RGB. Raises as `pillow.read`."""
    with BytesIO(data) as file:
        return pillow.read(file, recipe, FORMATS)


def _opened(file: BytesIO, data: bytes) -> Image.Image:
    try:
        return Image.open(file, formats=FORMATS)
    except UnidentifiedImageError:
        kind = kind_of(data)
        if kind == "avif" and not AvifImagePlugin.SUPPORTED:
            reason = "is an AVIF image, which the server's Pillow cannot read: it needs a Pillow that has AVIF"
        else:
            reason = f"is {NOT_HEIC if kind == 'heic' else NOT_AN_IMAGE}"
        raise NotDone(Fault.UNSUPPORTED, reason) from None


def _orientation(image: Image.Image, data: bytes) -> int:
    """The orientation in the image's metadata, 1 to 8; a PNG may have it after the pixels."""
    if image.format == "TIFF":  # turned as it is loaded, and its size is that of the turned picture
        return 1
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


# -- JPEG files that a device decodes as Pillow does, by their headers -------------------------------

_START, _END, _FILL = b"\xff\xd8", b"\xff\xd9", 0xFF
_BASELINE, _QUANTISATION, _ADOBE, _SCAN = 0xC0, 0xDB, 0xEE, 0xDA
_TABLE_BYTES, _WHOLE_SCAN = 65, b"\x00\x3f\x00"
"""A table of 8 bits; all coefficients at once."""
_SKIPPED = frozenset((0xC4, 0xDD, 0xFE, *range(0xE0, 0xF0)))
"""Markers of other tables, comments and metadata. After any other, libraries read on at different places, and each
could find another frame there."""
_YCC = ((1, 2, 3), (0, 1, 2))
"""Numbers of components that are read as luminance and colour differences."""
_SAMPLED = ((0x11, 0x11, 0x11), (0x21, 0x11, 0x11), (0x12, 0x11, 0x11), (0x22, 0x11, 0x11))
"""4:4:4, 4:2:2, 4:4:0 and 4:2:0: those that were compared with Pillow."""
_GREY = (0x11,)
"""Factors of a single component change nothing, but were not compared: decoders may take them for its blocks' order."""
_LEAST_SIDE = 16
"""Smaller pictures differed from Pillow's by up to 13."""
_ADOBE_BYTES, _YCC_TRANSFORM = 12, 1


def is_plain(data: bytes) -> bool:
    """True if a file is a baseline JPEG of one scan, grey or YCbCr, that ends.

    All others are left to Pillow: progressive, lossless, arithmetic and CMYK files, RGB, unusual sampling, small
    pictures, and files that are damaged or ambiguous in what this reads.
    """
    components = b""
    for marker, at, length in _segments(data):
        if marker == _BASELINE:
            if components or not (components := _components(data, at, length)):
                return False
        elif marker == _QUANTISATION:
            if length % _TABLE_BYTES or max(data[at : at + length : _TABLE_BYTES]) > 0x0F:
                return False
        elif marker == _ADOBE and data[at : at + 5] == b"Adobe":
            if length < _ADOBE_BYTES or data[at + _ADOBE_BYTES - 1] != _YCC_TRANSFORM:
                return False
        elif marker == _SCAN:
            return _is_whole(data[at : at + length], components) and data.find(_END, at + length) >= 0
        elif marker not in _SKIPPED:
            return False
    return False


def _segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Marker, start and bytes of the content of each segment, until one is damaged."""
    at = len(_START)
    while data.startswith(_START) and at + 4 < len(data) and data[at] == _FILL:
        marker = data[at + 1]
        if marker == _FILL:
            at += 1
            continue
        length = int(unpack_from(">H", data, at + 2)[0]) - 2
        if length < 1 or at + 4 + length > len(data):
            return
        yield marker, at + 4, length
        at += 4 + length


def _is_whole(scan: bytes, components: bytes) -> bool:
    """True if the header of a scan has all components in the order of the frame."""
    count = len(components)
    return count > 0 and scan[0] == count and scan[1:-3:2] == components and scan[1 + 2 * count :] == _WHOLE_SCAN


def _components(data: bytes, at: int, length: int) -> bytes:
    """The numbers of the components of a frame that a device decodes; none for others."""
    if length < 6:
        return b""
    precision, height, width, count = unpack_from(">BHHB", data, at)
    if precision != 8 or min(height, width) < _LEAST_SIDE or length != 6 + 3 * count:
        return b""
    names, sampling = data[at + 6 : at + length : 3], tuple(data[at + 7 : at + length : 3])
    is_read = sampling == _GREY if count == 1 else tuple(names) in _YCC and sampling in _SAMPLED
    return names if is_read else b""
