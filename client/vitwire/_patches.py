"""Frames to patch rows: target sizes of frames and the order of their patches, as in the Hugging Face
processors of the qwen2_vl, qwen2_5_vl, qwen3_vl and glm4v families.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from vitwire.sampling import Sampling

if TYPE_CHECKING:
    from vitwire._tiles import Tiling

Pixels = npt.NDArray[np.uint8]
Grid = tuple[int, int, int]
Size = tuple[int, int]

CHANNELS = 3
MAX_ASPECT_RATIO = 200
MAX_DECODED_PIXELS = 89_478_485
"""Larger images are refused before decoding: a quarter of a GiB as RGB, where Pillow starts to warn."""
RESIZINGS = ("area", "enlarged_area", "longest_side", "most_patches", "most_tokens")


@dataclass(frozen=True, slots=True)
class Preprocessor:
    """Settings of the model's Hugging Face processor for one modality."""

    patch_size: int
    merge_size: int
    temporal_patch_size: int
    min_pixels: int
    """Area bounds of the resized frame: `size.shortest_edge` and `size.longest_edge` of the processor."""
    max_pixels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    rescale_factor: float
    resample: int
    """Resampling filter as Pillow numbers it: 2 bilinear, 3 bicubic."""
    bounds_span_frames: bool = False
    """Whether the area bounds apply to all frames together (videos of Qwen3-VL, all of GLM-4V)."""
    resizing: str = "area"
    """How the target size is chosen: area, enlarged_area, longest_side, most_patches or most_tokens."""
    raster: bool = False
    """Whether patches are ordered row by row of the frame, rather than token by token."""
    channels_last: bool = False
    """Whether the columns of a patch are (p, p, C), rather than (C, T, p, p)."""
    tiling: "Tiling | None" = None
    """How images are cut, for tile models."""
    drops_transparency: bool = False
    """Whether the processor drops transparency, rather than using a white background."""
    sampling: Sampling | None = None
    """How the server chooses frames of encoded clips; None if it does not."""

    def __post_init__(self) -> None:
        for name in ("patch_size", "merge_size", "temporal_patch_size", "min_pixels", "max_pixels"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.resizing not in RESIZINGS:
            raise ValueError(f"resizing {self.resizing!r} is not supported by this version of the client")

    @property
    def factor(self) -> int:
        """Side of one token in pixels; resized frames are multiples of it."""
        return self.patch_size * self.merge_size


def smart_resize(height: int, width: int, settings: Preprocessor, frames: int = 1) -> Size:
    """Height and width to resize to: multiples of the factor, within the area bounds, nearly the same shape.

    `frames` (before repetition) matters only if the bounds span frames.
    Raises ValueError for empty or very long frames, and for too few if the bounds span frames.
    """
    if min(height, width) < 1:
        raise ValueError(f"expected at least one pixel, got a frame of {height}x{width}")
    factor, depth = settings.factor, 1
    if settings.bounds_span_frames:
        depth = _temporal_depth(frames, settings.temporal_patch_size)
        height, width = _at_least(factor, height, width)
    else:
        frames = 1
    if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
        raise ValueError(f"{height}x{width} is too elongated: the maximum aspect ratio is {MAX_ASPECT_RATIO}")

    rows, columns = round(height / factor), round(width / factor)
    area = depth * rows * factor * columns * factor
    if area > settings.max_pixels:
        shrink = math.sqrt(frames * height * width / settings.max_pixels)
        rows = max(1, math.floor(height / shrink / factor))
        columns = max(1, math.floor(width / shrink / factor))
    elif area < settings.min_pixels:
        grow = math.sqrt(settings.min_pixels / (frames * height * width))
        rows, columns = math.ceil(height * grow / factor), math.ceil(width * grow / factor)
    return rows * factor, columns * factor


def _temporal_depth(frames: int, group: int) -> int:
    """Frames rounded to a multiple of `group` as in the processor (ties to even)."""
    if frames < group:
        raise ValueError(f"this model needs clips of at least {group} frames, got {frames}")
    return round(frames / group) * group


def _at_least(side: int, height: int, width: int) -> Size:
    """The size enlarged so that both sides are at least `side`."""
    if min(height, width) >= side:
        return height, width
    scale = max(side / height, side / width)
    return int(height * scale), int(width * scale)


def patch_rows(frames: Iterable[Pixels], size: Size, slots: Size, settings: Preprocessor) -> tuple[Pixels, Grid]:
    """Rows of patches, and their grid, of RGB frames (H, W, 3) of `size`.

    `slots` is (t, T): t groups of T frames each; the last frame is repeated to fill them.
    Rows are in the order (t, h/m, w/m, m, m), so that the patches of one token are adjacent, or (t, h, w)
    for raster patches; their columns in the order (C, T, p, p) or (T, p, p, C).
    """
    patch, merge = settings.patch_size, 1 if settings.raster else settings.merge_size
    (height, width), (groups, depth) = size, slots
    high, wide = height // (patch * merge), width // (patch * merge)
    columns = (depth, patch, patch, CHANNELS) if settings.channels_last else (CHANNELS, depth, patch, patch)
    rows = np.empty((groups, high, wide, merge, merge, *columns), np.uint8)
    # (t, T, h/m, m, p, w/m, m, p, C): frames, as a view
    order = (0, 5, 1, 3, 6, 2, 4, 7, 8) if settings.channels_last else (0, 6, 1, 3, 7, 2, 4, 8, 5)
    canvas = rows.transpose(order)
    filled = 0
    for frame in frames:
        canvas[divmod(filled, depth)] = frame.reshape(canvas.shape[2:])
        filled += 1
    last = canvas[divmod(filled - 1, depth)]
    for spare in range(filled, groups * depth):
        canvas[divmod(spare, depth)] = last
    grid, shape = patch_shape(size, slots, settings)
    return rows.reshape(shape), grid


def patch_shape(size: Size, slots: Size, settings: Preprocessor) -> tuple[Grid, tuple[int, int]]:
    """The grid of frames of `size`, and the shape of its rows; `slots` as in `patch_rows`."""
    patch, (groups, depth) = settings.patch_size, slots
    grid = (groups, size[0] // patch, size[1] // patch)
    return grid, (math.prod(grid), CHANNELS * depth * patch * patch)
