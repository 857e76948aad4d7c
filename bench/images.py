"""Random images as items of a served model, and what gRPC carries for them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import numpy as np

from vitwire import Client, Item
from vitwire._transport.balancing import Share
from vitwire._transport.channel import ENCODE, ENCODE_STREAM
from vitwire._transport.protocol import Options, parts_of
from vitwire.model import Model
from vitwire_cli.bench.workload import Form, item_of, random_item

PIXELS = ("uint8", "float16", "float32", "picture", "jpeg")
"""Types of pixels, pictures, and files. Floats are patches of two equal frames, as of a processor; uint8 has one."""
_FORMS: Mapping[str, Form] = {"picture": "picture", "jpeg": "jpeg"}
SIZES = {"1080p": (1080, 1920), "12mp": (3024, 4032)}
"""Height and width of pictures of cameras."""


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
    if pixels in _FORMS:
        return [made(form=_FORMS[pixels], seed=seed) for seed in seeds]
    if size not in SIZES:
        side = max(1, int(size) // (model.patch_size * model.merge_size)) * model.merge_size
        grid = (1, side, side)
    else:
        grid = made(form="pixels").grid
    return [_random(model, grid, pixels, seed) for seed in seeds]


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
