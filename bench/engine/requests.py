"""Pictures of the benchmarks of towers, and the part of a prompt that stands for them."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from bench.engine.checkpoint import SPECIAL
from bench.engine.loads import Size
from PIL import Image

_IMAGE = [SPECIAL["<|vision_start|>"], SPECIAL["<|image_pad|>"], SPECIAL["<|vision_end|>"]]


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
