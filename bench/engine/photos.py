"""Requests with photographs as JPEG files, as clients of a chat API send them.

Photographs are crops of scikit-image's, scaled; their files have 1 to 2.5 bits a pixel. Each request has a file of its
own: a comment makes its bytes differ, so that no cache knows it, unless it repeats the image of an earlier request.
"""

import base64
import io
import json
import random
import string
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from bench.engine.loads import Size
from PIL import Image

MODEL = "bench"
"""The name of the model in requests."""
MIX = "mix"
_SHAPES = [(224, 224), (448, 448), (768, 576), (1024, 768), (1024, 1024), (1280, 960)]
_SHARES = [0.10, 0.25, 0.25, 0.15, 0.15, 0.10]
"""How often the mix has each shape (W, H). Quartiles of 196, 432 and 1024 tokens resemble a production service's
(ServeGen, Xiang et al., arXiv 2505.09999: 209, 432, 999)."""
_TEXT_SHARE = 0.5
"""Share of the mix that has no image."""
_NAMES = ("astronaut.png", "chelsea.png", "coffee.png", "rocket.jpg", "motorcycle_left.png", "retina.jpg")
_VARIANTS = 8
"""Crops of each shape."""
_BITS = (1.0, 2.5)
"""Bits a pixel of a file; the JPEG quality, 40 to 98, is chosen to come close."""


@dataclass(frozen=True, slots=True)
class Prompts:
    """What the requests of a stream ask."""

    size: str
    """SIDExIMAGES, or `mix`."""
    seed: int
    """Differs between streams whose images may not be equal."""
    text: int
    """Tokens of text; the benchmark's tokenizer makes one of each letter."""
    tokens: int
    """Tokens to generate."""
    repeats: float = 0.0
    """Share of requests that repeat the images of the request before."""

    def shapes(self, number: int) -> list[tuple[int, int]]:
        """Width and height of each image of a request."""
        if self.size != MIX:
            size = Size.of(self.size)
            return [(size.side, size.side)] * size.images
        rng = self._rng(number, "shape")
        return [] if rng.random() < _TEXT_SHARE else rng.choices(_SHAPES, _SHARES)

    def body(self, number: int) -> bytes:
        """The JSON of a request: half of the text, the images, the rest of the text."""
        source, rng = self._source(number), self._rng(number, "text")
        before, after = ("".join(rng.choices(string.ascii_letters, k=self.text // 2)) for _ in range(2))
        urls = [self._url(shape, source, index) for index, shape in enumerate(self.shapes(source))]
        photos = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        content = [{"type": "text", "text": before}, *photos, {"type": "text", "text": after}]
        fields: dict[str, Any] = {"temperature": 0, "max_tokens": self.tokens, "ignore_eos": True, "stream": True}
        fields |= {"return_token_ids": True, "stream_options": {"include_usage": True}}
        return json.dumps({"model": MODEL, "messages": [{"role": "user", "content": content}], **fields}).encode()

    def images(self, number: int) -> int:
        """Images of a request."""
        return len(self.shapes(self._source(number)))

    def _source(self, number: int) -> int:
        """The request whose images these are."""
        while number and self._rng(number, "repeat").random() < self.repeats:
            number -= 1
        return number

    def _rng(self, number: int, what: str) -> random.Random:
        return random.Random(f"{self.seed} {self.size} {number} {what}")

    def _url(self, shape: tuple[int, int], number: int, index: int) -> str:
        file = photograph(shape, self._rng(number, f"variant {index}").randrange(_VARIANTS))
        comment = f"{self.seed}-{self.size}-{number}-{index}".encode()
        return "data:image/jpeg;base64," + base64.b64encode(commented(file, comment)).decode()


def commented(file: bytes, comment: bytes) -> bytes:
    """A JPEG file with a comment after its first segment, which is JFIF's."""
    at = 4 + int.from_bytes(file[4:6], "big")
    return file[:at] + b"\xff\xfe" + (2 + len(comment)).to_bytes(2, "big") + comment + file[at:]


@lru_cache(maxsize=512)
def photograph(shape: tuple[int, int], variant: int) -> bytes:
    """A JPEG file of this width and height."""
    rng = random.Random(f"{shape} {variant}")
    photo = _photos()[variant % len(_NAMES)]
    scale = rng.uniform(0.6, 1.0) * min(photo.width / shape[0], photo.height / shape[1])
    width, height = int(shape[0] * scale), int(shape[1] * scale)
    left, top = rng.randrange(photo.width - width + 1), rng.randrange(photo.height - height + 1)
    crop = photo.resize(shape, Image.Resampling.LANCZOS, (left, top, left + width, top + height))
    return _saved(crop, rng.uniform(*_BITS) * shape[0] * shape[1] / 8)


def _saved(photo: Any, nbytes: float) -> bytes:
    """The file of the highest quality that has at most this many bytes, by bisection."""
    low, high, best = 40, 98, b""
    while low <= high:
        quality, file = (low + high) // 2, io.BytesIO()
        photo.save(file, "JPEG", quality=quality)
        fits = len(file.getvalue()) <= nbytes
        best = file.getvalue() if fits or not best else best
        low, high = (quality + 1, high) if fits else (low, quality - 1)
    return best


@lru_cache(maxsize=1)
def _photos() -> Sequence[Any]:
    """Pillow's, in RGB."""
    import skimage  # noqa: PLC0415 - only where requests are made; its folder of data is all that is used

    folder = Path(skimage.__file__).parent / "data"
    return [Image.open(folder / name).convert("RGB") for name in _NAMES]
