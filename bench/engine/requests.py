"""Requests: prompts of random text around pictures, different for each request and equal on each route."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from bench.engine.checkpoint import FIRST_BYTE, SPECIAL
from bench.engine.loads import Size
from PIL import Image

from vitwire import AsyncClient, Item, Model

_IMAGE = [SPECIAL["<|vision_start|>"], SPECIAL["<|image_pad|>"], SPECIAL["<|vision_end|>"]]


@dataclass(frozen=True, slots=True)
class Asked:
    """One request, before anyone has prepared it for an engine."""

    prompt: Sequence[int]
    pictures: Sequence[Any]
    """Pillow's, decoded."""
    items: Sequence[Item]
    """The same as the model's processor cuts them, in uint8; none without a server."""


async def draw(size: Size, count: int, text: int, client: AsyncClient | None, seed: int = 0) -> list[Asked]:
    """Requests of a size, with `text` tokens of text each; the pictures are decoded and split into patches."""
    model = await client.model() if client else None

    def one(number: int) -> Asked:
        key = (seed, size.side, size.images, number)
        pictures = [picture(size.side, (*key, index)) for index in range(size.images)]
        rng = random.Random(str(key))
        words = [rng.randrange(FIRST_BYTE, FIRST_BYTE + 256) for _ in range(text)]
        prompt = [*words[: text // 2], *image_tokens(size.images), *words[text // 2 :]]
        return Asked(prompt, pictures, [patches_of(each, model) for each in pictures] if model else [])

    return list(await asyncio.gather(*(asyncio.to_thread(one, number) for number in range(count))))


def patches_of(picture: Any, model: Model) -> Item:
    """A picture as uint8 patches in the order of Qwen's processor. Raises ValueError if that would resize it."""
    pixels, patch, merge = np.asarray(picture), model.patch_size, model.merge_size
    height, width, channels = pixels.shape
    if height % (patch * merge) or width % (patch * merge):
        raise ValueError(f"{width} x {height} is resized by the processor: take multiples of {patch * merge}")
    rows, columns = height // patch, width // patch
    split = pixels.reshape(rows // merge, merge, patch, columns // merge, merge, patch, channels)
    patches = split.transpose(0, 3, 1, 4, 6, 2, 5).reshape(rows * columns, channels * patch * patch)
    return Item(patches, (1, rows, columns))


def image_tokens(images: int) -> list[int]:
    """The part of a prompt that stands for images."""
    return _IMAGE * images


@lru_cache(maxsize=1)
def pictures_of(size: Size) -> list[Any]:
    """The pictures of a forward: Pillow's, or one clip `(frames, H, W, 3)`."""
    frames = [picture(size.side, (0, size.side, index)) for index in range(size.images * size.frames)]
    return frames if size.frames == 1 else [np.stack([np.asarray(each) for each in frames])]


def picture(side: int, seed: Sequence[int]) -> Any:
    """Low and high frequencies."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (max(1, side // 16), max(1, side // 16), 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize((side, side), Image.Resampling.BICUBIC), np.int16)
    noise = rng.integers(-24, 25, (side, side, 3), np.int16)
    return Image.fromarray(np.clip(smooth + noise, 0, 255).astype(np.uint8))
