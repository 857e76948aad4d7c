"""JPEG files that a device decodes as Pillow does, by their headers."""

from collections.abc import Iterator
from struct import unpack_from

_START, _END, _FILL = b"\xff\xd8", b"\xff\xd9", 0xFF
_BASELINE, _QUANTISATION, _ADOBE, _SCAN = 0xC0, 0xDB, 0xEE, 0xDA
_TABLE_BYTES, _WHOLE_SCAN = 65, b"\x00\x3f\x00"
"""Of a table of 8 bits; all coefficients at once."""
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
