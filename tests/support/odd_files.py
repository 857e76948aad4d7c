"""GIFs and BMPs written byte by byte, as no library of today writes them."""

import struct
from collections.abc import Callable
from random import Random

_COLOURS = bytes((10, 20, 30, 200, 100, 50, 0, 255, 0, 90, 90, 250))
_CLEAR, _END = 4, 5
_BITS = 3
"""Of a code of two-bit pixels before the first new code, which clearing often enough puts off forever."""


def gif(
    canvas: tuple[int, int],
    frame: tuple[int, int],
    at: tuple[int, int] = (0, 0),
    *,
    transparent: int | None = None,
    disposal: int = 0,
    background: int = 0,
    own_colours: bool = False,
    pictures: int = 1,
) -> bytes:
    """A GIF whose pictures, all alike, need not cover its canvas; sizes and places are `(across, down)`.

    `own_colours`: the palette is the picture's, not the file's.
    """
    whole, own = (b"", _COLOURS) if own_colours else (_COLOURS, b"")
    head = b"GIF89a" + struct.pack("<HHBBB", *canvas, 0x81 if whole else 0, background, 0) + whole
    control = struct.pack("<BHBB", disposal << 2 | (transparent is not None), 10, transparent or 0, 0)
    place = b"," + struct.pack("<HHHHB", *at, *frame, 0x81 if own else 0) + own
    picture = b"!\xf9\x04" + control + place + b"\x02" + _blocks(frame[0] * frame[1]) + b"\0"
    return head + picture * pictures + b";"


def _blocks(pixels: int) -> bytes:
    """Pixels of the colours 0, 1 and 2 in turn, hardly compressed."""
    codes = [code for n in range(pixels) for code in ([_CLEAR] if n % 2 == 0 else []) + [n % 3]] + [_END]
    number = sum(code << _BITS * place for place, code in enumerate(codes))
    data = number.to_bytes(-(-_BITS * len(codes) // 8), "little")
    parts = [data[start : start + 255] for start in range(0, len(data), 255)]
    return b"".join(bytes([len(part)]) + part for part in parts)


def noise(count: int) -> bytes:
    """The same bytes each time."""
    return Random(count).randbytes(count)


def bmp(
    size: tuple[int, int], bits: int, data: bytes, coding: int = 0, palette: bytes = b"", masks: bytes = b""
) -> bytes:
    """A BMP of `(width, height)` as its header says, whatever its data are; more than 12 bytes of masks: version 4."""
    length = 40 if len(masks) <= 12 else 40 + len(masks)
    header = struct.pack("<IiiHHIIiiII", length, *size, 1, bits, coding, len(data), 0, 0, len(palette) // 4, 0) + masks
    start = 14 + len(header) + len(palette)
    return b"BM" + struct.pack("<IHHI", start + len(data), 0, 0, start) + header + palette + data


_P = noise(1024)
_ALPHA = struct.pack("<IIII", 0xFF0000, 0xFF00, 0xFF, 0xFF000000) + bytes(52)
_565 = struct.pack("<III", 0xF800, 0x7E0, 0x1F)

GIFS: dict[str, Callable[[], bytes]] = {
    "covers its canvas": lambda: gif((40, 30), (40, 30)),
    "smaller": lambda: gif((40, 30), (10, 12), (5, 6)),
    "smaller, another background": lambda: gif((40, 30), (10, 12), (5, 6), background=2),
    "smaller, transparent": lambda: gif((40, 30), (10, 12), (5, 6), transparent=1),
    "smaller, its own palette": lambda: gif((40, 30), (10, 12), (5, 6), own_colours=True),
    "its own palette, transparent": lambda: gif((40, 30), (10, 12), (5, 6), own_colours=True, transparent=2),
    "reaches beyond its canvas": lambda: gif((10, 10), (40, 30), (5, 5)),
    "no canvas": lambda: gif((0, 0), (40, 30)),
    "back to the background": lambda: gif((40, 30), (10, 12), (5, 6), disposal=2, pictures=2),
    "back to the picture before": lambda: gif((40, 30), (10, 12), (5, 6), disposal=3, pictures=3, transparent=0),
    "the second is cut off": lambda: gif((40, 30), (40, 30), pictures=2)[:725],
    "the second is damaged": lambda: gif((40, 30), (40, 30))[:-1] + b",\1\0",
}
BMPS: dict[str, Callable[[], bytes]] = {
    "top down": lambda: bmp((30, -20), 24, noise(92 * 20)),
    "32 bits": lambda: bmp((30, 20), 32, noise(120 * 20)),
    "32 bits with alpha": lambda: bmp((30, 20), 32, noise(120 * 20), 3, masks=_ALPHA),
    "16 bits": lambda: bmp((30, 20), 16, noise(60 * 20)),
    "16 bits, six of green": lambda: bmp((30, -20), 16, noise(60 * 20), 3, masks=_565),
    "8 bits, few colours": lambda: bmp((30, 20), 8, noise(32 * 20), palette=_P[:40]),
    "4 bits": lambda: bmp((30, 20), 4, noise(16 * 20), palette=_P[:64]),
    "1 bit": lambda: bmp((30, 20), 1, noise(4 * 20), palette=_P[:8]),
    "runs of 8 bits": lambda: bmp((30, 20), 8, _runs(), 1, palette=_P),
    "runs of 4 bits": lambda: bmp((30, 20), 4, _runs(), 2, palette=_P[:64]),
    "version 2": lambda: b"BM" + struct.pack("<IHHIIHHHH", 26 + 1840, 0, 0, 26, 12, 30, 20, 1, 24) + noise(1840),
}
BAD: dict[str, tuple[Callable[[], bytes], str]] = {
    "gif that ends early": (lambda: gif((40, 30), (40, 30))[:100], "truncated"),
    "gif of nothing": (lambda: gif((40, 30), (0, 0)), "cannot"),
    "gif without a picture": (lambda: gif((40, 30), (4, 4))[:20] + b";", "is not a JPEG"),
    "gif with a huge canvas": (lambda: gif((65535, 65535), (4, 4)), "pixels"),
    "gif with a large canvas": (lambda: gif((9000, 9000), (4, 4)), "9000x9000 exceeds the limit"),
    "bmp that ends early": (lambda: bmp((30, 20), 24, noise(900)), "truncated"),
    "bmp that is larger than its data": (lambda: bmp((300, 200), 24, noise(1840)), "truncated"),
    "huge bmp": (lambda: bmp((60000, 60000), 24, b"abc"), "pixels"),
    "bmp of lowest height": (lambda: bmp((30, -(1 << 31)), 24, noise(1840)), "pixels"),
    "bmp of negative width": (lambda: bmp((-30, 20), 24, noise(1840)), "pixels"),
    "bmp of no width": (lambda: bmp((0, 20), 24, noise(100)), "is not a JPEG"),
    "bmp with too few runs": (lambda: bmp((8000, 8000), 8, b"\0\1", 1, palette=_P), "cannot"),
    "bmp with a png in it": (lambda: bmp((30, 20), 0, b"\x89PNG\r\n\x1a\n", 5), "cannot"),
}
"""Invalid files, and a part of the reason."""


def _runs() -> bytes:
    """20 rows of 30 equal pixels each."""
    return b"".join(bytes([30, row, 0, 0]) for row in range(20)) + b"\0\1"
