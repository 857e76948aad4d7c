"""Image processors of authors' own, written down up to the conversion to tensors: tiles `(tiles, H, W, 3)`, uint8."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

Tiles = NDArray[np.uint8]


def h2ovl_tiles(image: Image.Image, tile: int, most: int) -> Tiles:
    """H2OVL's multi-scale adaptive cropping of a prompt's only image.

    huggingface.co/h2oai/h2ovl-mississippi-2b, image_process.py, as in vllm/model_executor/models/h2ovl.py.
    """
    ratio, coarse = _cropped(image, tile, (1, most), None)
    _, fine = _cropped(image, tile, (3, most), ratio)
    return _stacked([*fine[:-1], *coarse[:-1], fine[-1]])


def _cropped(
    image: Image.Image, tile: int, bounds: tuple[int, int], prior: tuple[int, int] | None
) -> tuple[tuple[int, int], list[Image.Image]]:
    """The nearest ratio and its tiles, the whole image behind them if there are several."""
    fewest, most = bounds
    sides = range(1, most + 1)
    ratios = sorted(((w, h) for w in sides for h in sides if fewest <= w * h <= most), key=lambda r: r[0] * r[1])
    if prior:
        ratios = [(w, h) for w, h in ratios if prior[0] % w != 0 and prior[1] % h != 0]
    best, distance = (1, 1), float("inf")
    for w, h in ratios:
        off = abs(image.width / image.height - w / h)
        if off < distance or (off == distance and image.width * image.height > 0.5 * tile**2 * w * h):
            best, distance = (w, h), off
    whole = image.resize((best[0] * tile, best[1] * tile))
    parts = _split(whole, tile)
    return best, [*parts, image.resize((tile, tile))] if len(parts) > 1 else parts


def deepseek_vl2_tiles(image: Image.Image, sides: Sequence[tuple[int, int]], shade: int) -> Tiles:
    """The whole image, and the tiles of the resolution `(width, height)` that keeps most of it.

    github.com/deepseek-ai/DeepSeek-VL2, deepseek_vl2/models/processing_deepseek_vl_v2.py.
    """
    tile, best, most, least = sides[0][0], sides[0], 0, float("inf")
    for width, height in sides:
        scale = min(width / image.width, height / image.height)
        kept = min(int(image.width * scale) * int(image.height * scale), image.width * image.height)
        wasted = width * height - kept
        if kept > most or (kept == most and wasted < least):
            best, most, least = (width, height), kept, wasted
    overview, whole = (ImageOps.pad(image, (wide, high), color=(shade,) * 3) for wide, high in ((tile, tile), best))
    return _stacked([overview, *_split(whole, tile)])


def eagle_tiles(image: Image.Image, tile: int, most: int) -> Tiles:
    """The tiles of Eagle 2.5's processor, with Pillow's resizing rather than torchvision's.

    github.com/NVlabs/Eagle, Eagle2_5/eaglevl/model/eagle2_5/image_processing_eagle2_5_vl_fast.py.
    """
    sides = range(1, most + 1)
    ratios = sorted(((w, h) for w in sides for h in sides if w * h <= most), key=lambda r: r[0] * r[1])
    shape, best, highest = image.width / image.height, (1, 1), float("-inf")
    for w, h in ratios:
        factor = min(w * h * tile * tile / (image.width * image.height), 0.6) * min(w / h / shape, shape / (w / h))
        if factor > highest:
            best, highest = (w, h), factor
    parts: list[Any] = _split(image.resize((best[0] * tile, best[1] * tile)), tile)
    return _stacked([*parts, image.resize((tile, tile))] if len(parts) > 1 else parts)


def moondream_crops(image: Image.Image, *, tile: int, most: int, margin: int) -> Tiles:
    """The whole image, and crops that overlap; `margin` in pixels.

    huggingface.co/moondream/moondream3-preview, image_crops.py, as in vLLM's `Moondream3Processor`.
    """
    window = tile - 2 * margin
    height, width = image.height - 2 * margin, image.width - 2 * margin
    if height <= window or width <= window:
        rows = columns = 1
    elif (fewest := math.ceil(height / window) * math.ceil(width / window)) > most:
        rows, columns = (
            max(1, math.floor(math.ceil(length / window) * math.sqrt(most / fewest))) for length in (height, width)
        )
    else:
        rows = max(math.floor(math.sqrt(most * height / width)), math.ceil(height / window))
        columns = max(math.floor(math.sqrt(most * width / height)), math.ceil(width / window))
        if rows * columns > most and columns > rows:
            columns = math.floor(most / rows)
        elif rows * columns > most:
            rows = math.floor(most / columns)
    sides = rows * window + 2 * margin, columns * window + 2 * margin
    whole = np.asarray(image.resize(sides[::-1], Image.Resampling.LANCZOS))
    corners = [(row * window, column * window) for row in range(rows) for column in range(columns)]
    crops = [whole[top : top + tile, left : left + tile] for top, left in corners]
    return np.stack([np.asarray(image.resize((tile, tile), Image.Resampling.LANCZOS)), *crops])


def minicpm_slices(image: Image.Image, *, most: int = 9, scale: int = 448, patch: int = 14) -> list[Image.Image]:
    """The whole image and its slices. huggingface.co/openbmb/MiniCPM-V-2_6, image_processing_minicpmv.py."""

    def whole(length: float, unit: int) -> int:
        return max(round(length / unit) * unit, unit)

    def fitted(width: float, height: float, *, enlarge: bool) -> tuple[int, int]:
        if width * height > scale * scale or enlarge:
            ratio = width / height
            height = int(scale / math.sqrt(ratio))
            width = int(height * ratio)
        return whole(width, patch), whole(height, patch)

    wanted = min(math.ceil(image.width * image.height / scale**2), most)
    if wanted <= 1:
        return [image.resize(fitted(*image.size, enlarge=True), Image.Resampling.BICUBIC)]
    counts = [n for n in (wanted - 1, wanted, wanted + 1) if 1 < n <= most]
    grids = [(m, n // m) for n in counts for m in range(1, n + 1) if n % m == 0]
    shape = math.log(image.width / image.height)
    across, down = min(grids, key=lambda grid: abs(shape - math.log(grid[0] / grid[1])))
    overview = image.resize(fitted(*image.size, enlarge=False), Image.Resampling.BICUBIC)
    width, height = fitted(whole(image.width, across) / across, whole(image.height, down) / down, enlarge=True)
    refined = image.resize((width * across, height * down), Image.Resampling.BICUBIC)
    boxes = [(x * width, y * height, (x + 1) * width, (y + 1) * height) for y in range(down) for x in range(across)]
    return [overview, *(refined.crop(box) for box in boxes)]


def _split(image: Image.Image, tile: int) -> list[Image.Image]:
    corners = [(x, y) for y in range(0, image.height, tile) for x in range(0, image.width, tile)]
    return [image.crop((x, y, x + tile, y + tile)) for x, y in corners]


def _stacked(tiles: Sequence[Any]) -> Tiles:
    return np.stack([np.asarray(each) for each in tiles])
