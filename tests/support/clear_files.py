"""Files of pictures with transparency, of every kind that decoders read."""

import struct
from collections.abc import Callable, Sequence
from functools import partial
from zlib import compress

import numpy as np
from PIL import Image, ImageDraw

from encoded_files import chunk, photograph, saved
from odd_files import BMPS, GIFS

_PNG = b"\x89PNG\r\n\x1a\n"
_HEIGHT, _WIDTH = 60, 90


def black_text() -> Image.Image:
    """Black text on nothing: all colours are black, the text is in alpha alone."""
    image = Image.new("RGBA", (160, 120), (0, 0, 0, 0))
    ImageDraw.Draw(image).text((10, 20), "invoice\n1,234.56", fill=(0, 0, 0, 255), font_size=32)
    return image


def faded() -> Image.Image:
    """A photograph with every alpha."""
    image = photograph(_HEIGHT, _WIDTH).convert("RGBA")
    image.putalpha(Image.linear_gradient("L").resize(image.size))
    return image


def _palette(alphas: bytes | int) -> bytes:
    return saved(photograph(_HEIGHT, _WIDTH).quantize(64), "PNG", transparency=alphas)


def _keyed(mode: str) -> bytes:
    image = photograph(_HEIGHT, _WIDTH).quantize(4).convert(mode)
    return saved(image, "PNG", transparency=image.getpixel((0, 0)))


def _raw(depth: int, colour: int, samples: int, key: Sequence[int] = ()) -> bytes:
    """A PNG of a depth that Pillow does not write, with the photograph's values in it, and a transparent colour."""
    values = np.array(faded())[..., [0, 3] if samples == 2 else range(samples)]
    values[:5] = 0
    if depth == 16:
        rows = (values.astype(">u2") * 257).reshape(_HEIGHT, -1).view(np.uint8)
    else:
        rows = np.packbits(values[..., 0] >> 7, axis=1)
    header = struct.pack(">IIBBBBB", _WIDTH, _HEIGHT, depth, colour, 0, 0, 0)
    data = compress(b"".join(b"\0" + row.tobytes() for row in rows))
    clear = chunk(b"tRNS", struct.pack(f">{len(key)}H", *key)) if key else b""
    return _PNG + chunk(b"IHDR", header) + clear + chunk(b"IDAT", data) + chunk(b"IEND", b"")


CLEAR: dict[str, Callable[[], bytes]] = {
    "black text": lambda: saved(black_text(), "PNG"),
    "rgba": lambda: saved(faded(), "PNG"),
    "grey with alpha": lambda: saved(faded().convert("LA"), "PNG"),
    "rgba of 16 bits": lambda: _raw(16, 6, 4),
    "grey with alpha of 16 bits": lambda: _raw(16, 4, 2),
    "palette with alphas": lambda: _palette(bytes(range(0, 256, 4))),
    "palette with few alphas": lambda: _palette(b"\0\x80"),
    "palette with a clear colour": lambda: _palette(3),
    "clear colour": lambda: _keyed("RGB"),
    "clear grey": lambda: _keyed("L"),
    "clear white of one bit": lambda: _raw(1, 0, 1, (1,)),
    "clear grey of 16 bits": lambda: _raw(16, 0, 1, (0,)),
    "clear colour of 16 bits": lambda: _raw(16, 2, 3, (0, 0, 0)),
    "turned": lambda: saved(faded(), "PNG", exif=_exif(6)),
    "webp": lambda: saved(faded(), "WEBP", quality=80),
    "lossless webp": lambda: saved(faded(), "WEBP", lossless=True),
    "turned webp": lambda: saved(faded(), "WEBP", exif=_exif(7)),
    **{kind: partial(saved, faded(), kind) for kind in ("AVIF", "TIFF", "JPEG2000", "ICO")},
    "bmp": BMPS["32 bits with alpha"],
    "gif": GIFS["smaller, transparent"],
    "gif of its own palette": GIFS["its own palette, transparent"],
}
"""How to make each."""


def _exif(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif
