"""Random images as items of a served model, and what gRPC carries for them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vitwire import Item
from vitwire._balancing import Share
from vitwire._channel import ENCODE, ENCODE_STREAM
from vitwire._model import Model
from vitwire._protocol import Options, parts_of

PIXELS = ("uint8", "float16", "float32")
"""Types of pixels. uint8 leaves out the second frame of an image, which repeats the first."""


@dataclass(frozen=True, slots=True)
class Messages:
    """A request as bytes, in the messages in which the client sends it."""

    path: str
    messages: Sequence[bytes]

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.messages))


def random_image(model: Model, side: int, pixels: str, seed: int) -> Item:
    """A square image of `side` pixels, rounded down to whole tokens, of a model that takes patches."""
    patches = max(1, side // (model.patch_size * model.merge_size)) * model.merge_size
    columns = model.channels * model.patch_size**2
    rng = np.random.default_rng(seed)
    shape = (patches * patches, columns * (1 if pixels == "uint8" else model.temporal_patch_size))
    if pixels == "uint8":
        return Item(rng.integers(0, 256, shape, dtype=np.uint8), (1, patches, patches))
    return Item(rng.standard_normal(shape, dtype=np.float32).astype(pixels), (1, patches, patches))


def serialised(items: Sequence[Item], model: Model) -> Messages:
    """What the client sends for these items in one request."""
    shares = [Share(tuple(range(len(items))), None)]
    (part,) = parts_of(dict(enumerate(items)), shares, Options.of(None, "interactive"), model)
    if part.one_message:
        return Messages(ENCODE.path, [ENCODE.serializer(part.request())])
    return Messages(ENCODE_STREAM.path, [ENCODE_STREAM.serializer(frame) for frame in part.uploads()])
