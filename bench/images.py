"""Random images as items of a served model, and what gRPC carries for them."""

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitwire import Client, Item
from vitwire._balancing import Share
from vitwire._channel import ENCODE, ENCODE_STREAM
from vitwire._model import Model
from vitwire._protocol import Options, parts_of

PIXELS = ("uint8", "float16", "float32", "picture", "jpeg")
"""Types of pixels as a processor returns them, pictures, and files. uint8 leaves out the second frame of an image."""
SIZES = {"1080p": (1080, 1920), "12mp": (3024, 4032)}
"""Height and width of pictures of cameras."""
_QUALITY = 85


@dataclass(frozen=True, slots=True)
class Messages:
    """A request as bytes, in the messages in which the client sends it."""

    path: str
    messages: Sequence[bytes]

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.messages))


def images_of(client: Client, size: str, pixels: str, seeds: Iterable[int]) -> list[Item]:
    """An image for each seed, of a side or a name of `SIZES`, for a server that takes patches.

    Pixels of a side have whole tokens, those of a name the grid that the server chooses for a picture of that size.
    """
    model = client.model()
    shape = SIZES.get(size) or (int(size), int(size))
    if pixels == "jpeg":
        return [Item(encoded=_jpeg(*shape, seed)) for seed in seeds]
    if pixels == "picture":
        return [Item(_drawn(*shape, seed)) for seed in seeds]
    if size not in SIZES:
        return [random_image(model, int(size), pixels, seed) for seed in seeds]
    _, rows, columns = client.encode([Item(_drawn(*shape, 0))])[0].grid
    return [_random(model, rows, columns, pixels, seed) for seed in seeds]


def random_image(model: Model, side: int, pixels: str, seed: int) -> Item:
    """A square image of `side` pixels, rounded down to whole tokens, of a model that takes patches."""
    patches = max(1, side // (model.patch_size * model.merge_size)) * model.merge_size
    return _random(model, patches, patches, pixels, seed)


def _random(model: Model, rows: int, columns: int, pixels: str, seed: int) -> Item:
    values = model.channels * model.patch_size**2 * (1 if pixels == "uint8" else model.temporal_patch_size)
    rng, shape = np.random.default_rng(seed), (rows * columns, values)
    if pixels == "uint8":
        return Item(rng.integers(0, 256, shape, dtype=np.uint8), (1, rows, columns))
    return Item(rng.standard_normal(shape, dtype=np.float32).astype(pixels), (1, rows, columns))


def _drawn(height: int, width: int, seed: int) -> NDArray[np.uint8]:
    """A picture `(height, width, 3)` with detail at several scales, fainter the finer it is, and a little noise."""
    rng, canvas = np.random.default_rng(seed), np.full((height, width, 3), 128.0, np.float32)
    for scale in (256, 64, 16, 4):
        coarse = rng.normal(0, scale**0.5 * 3, (height // scale + 2, width // scale + 2, 3)).astype(np.float32)
        canvas += coarse.repeat(scale, 0).repeat(scale, 1)[:height, :width]
    canvas += rng.normal(0, 2, canvas.shape)
    return canvas.round().clip(0, 255).astype(np.uint8)


def _jpeg(height: int, width: int, seed: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(_drawn(height, width, seed)).save(file, "JPEG", quality=_QUALITY)
    return file.getvalue()


def serialised(items: Sequence[Item], model: Model) -> Messages:
    """What the client sends for these items in one request."""
    shares = [Share(tuple(range(len(items))), None)]
    (part,) = parts_of(dict(enumerate(items)), shares, Options.of(None, "interactive"), model)
    if part.one_message:
        return Messages(ENCODE.path, [ENCODE.serializer(part.request())])
    return Messages(ENCODE_STREAM.path, [ENCODE_STREAM.serializer(frame) for frame in part.uploads()])
