"""Random images as items of a served model, and what gRPC carries for them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from math import prod

import av
import numpy as np

from vitwire import Client, Item
from vitwire._transport.balancing import Share
from vitwire._transport.channel import ENCODE, ENCODE_STREAM
from vitwire._transport.protocol import Options, parts_of
from vitwire.model import Model
from vitwire_cli.bench.workload import Form, item_of, random_item

PIXELS = ("uint8", "float16", "float32", "picture", "jpeg", "clip")
"""Types of pixels, pictures, and files. Floats are patches of two equal frames, as of a processor; uint8 has one."""
_FORMS: Mapping[str, Form] = {"picture": "picture", "jpeg": "jpeg"}
SIZES = {"448p": (448, 640), "1080p": (1080, 1920), "12mp": (3024, 4032)}
"""Height and width of pictures and clips of cameras."""
_FRAMES = 300
"""Frames of a clip of 10 s."""


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
    height, width = SIZES.get(size) or (int(size), int(size))
    made = partial(random_item, (height, width), 0, model=model, grid_of=lambda item: client.encode([item])[0].grid)
    if pixels == "clip":  # bytes behind its end make each differ, so that none is cached
        file = _film(height, width)
        return [Item(encoded=file + seed.to_bytes(8), modality="video") for seed in seeds]
    if pixels in _FORMS:
        return [made(form=_FORMS[pixels], seed=seed) for seed in seeds]
    if size not in SIZES:
        side = max(1, int(size) // (model.patch_size * model.merge_size)) * model.merge_size
        grid = (1, side, side)
    else:
        grid = made(form="pixels").grid
    return [_random(model, grid, pixels, seed) for seed in seeds]


def _film(height: int, width: int) -> bytes:
    """A clip in H.264 with a keyframe every 2 s: a camera moves along a random mosaic, by 2 pixels a frame."""
    stones = np.random.default_rng(0).integers(0, 256, (-(-height // 16), width // 16 + _FRAMES, 3), np.uint8)
    mosaic = np.kron(stones, np.ones((16, 16, 1), np.uint8))[:height]
    with BytesIO() as file:
        with av.open(file, "w", format="mp4") as container:
            stream = container.add_stream("libx264", rate=30, options={"preset": "veryfast", "g": "60"})
            stream.height, stream.width, stream.pix_fmt = height, width, "yuv420p"
            for left in range(0, 2 * _FRAMES, 2):
                container.mux(stream.encode(av.VideoFrame.from_ndarray(mosaic[:, left : left + width].copy())))
            container.mux(stream.encode())
        return file.getvalue()


def _random(model: Model, grid: tuple[int, int, int], pixels: str, seed: int) -> Item:
    if pixels == "uint8":
        return item_of(grid, "image", model, seed)
    shape = (prod(grid), model.channels, 1, model.patch_size**2)
    once = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32).astype(pixels)
    return Item(np.repeat(once, model.temporal_patch_size, axis=2).reshape(len(once), -1), grid)


def serialised(items: Sequence[Item], model: Model) -> Messages:
    """What the client sends for these items in one request."""
    shares = [Share(tuple(range(len(items))), None)]
    (part,) = parts_of(dict(enumerate(items)), shares, Options.of(None, "interactive"), model)
    if part.one_message:
        return Messages(ENCODE.path, [ENCODE.serializer(part.request())])
    return Messages(ENCODE_STREAM.path, [ENCODE_STREAM.serializer(frame) for frame in part.uploads()])
