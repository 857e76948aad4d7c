"""Pictures with the statistics of photographs, drawn from a seed: what the precision of a tower is measured on.

They are dead leaves: discs that hide each other, their radii distributed so that no scale stands out. As in
photographs, there are edges, shading, texture, noise and flat regions, and detail is fainter the finer it is.
"""

from collections.abc import Sequence
from math import pi

import torch
from torch import Tensor

from vitwire_server.core.grids import Grid
from vitwire_server.core.items import DType, Item, Modality, Pixels
from vitwire_server.core.models import Geometry, TileGeometry
from vitwire_server.towers.tower import Tower

_LEAVES = 400
_SMALLEST, _LARGEST = 0.025, 0.4
"""Radii, as shares of the longer side."""
_NOISE = 4.0
_GREY = 0.6
"""How much of a colour is its brightness."""


def picture_items(tower: Tower, grids: Sequence[Grid], seed: int = 0) -> list[Item]:
    """A picture for each grid, as uint8 images whose rows are returned in float32."""
    generator = torch.Generator().manual_seed(seed)
    geometry, items = tower.geometry, []
    for grid in grids:
        shape, second = geometry.shapes(grid, Modality.IMAGE)[-1], geometry.crops(grid)
        pixels = _pixels(shape, grid, geometry, generator)
        crops = _tiles(second, generator) if second else None
        items.append(Item(Modality.IMAGE, grid, pixels, tower.footprint(grid), DType.FLOAT32, crops=crops))
    return items


def dead_leaves(height: int, width: int, generator: torch.Generator) -> Tensor:
    """A picture `(3, height, width)` in uint8."""
    side = max(height, width)
    canvas = torch.full((3, height, width), 128.0)
    draws = torch.rand(_LEAVES, 10, generator=generator).tolist()
    for down, right, size, *rest in draws:
        # Inverse of the distribution with density 1/r^3 between the smallest and the largest radius.
        radius = side * (size * _LARGEST**-2 + (1 - size) * _SMALLEST**-2) ** -0.5
        _cover(canvas, down * height, right * width, radius, rest)
    canvas += _NOISE * torch.randn(3, height, width, generator=generator)
    return canvas.round().clamp(0, 255).to(torch.uint8)


def _cover(canvas: Tensor, row: float, column: float, radius: float, draws: Sequence[float]) -> None:
    """Draw one disc: a colour, shaded to one side and striped. `draws` are numbers from 0 to 1."""
    top, left = max(0, int(row - radius)), max(0, int(column - radius))
    part = canvas[:, top : int(row + radius) + 1, left : int(column + radius) + 1]
    down = torch.arange(top, top + part.shape[1], dtype=torch.float32)[:, None] - row
    right = torch.arange(left, left + part.shape[2], dtype=torch.float32)[None] - column
    *colour, direction, shade, stripes, wave = draws
    along = down * torch.sin(torch.tensor(2 * pi * direction)) + right * torch.cos(torch.tensor(2 * pi * direction))
    light = 80 * (shade - 0.5) * along / radius + 30 * stripes * torch.sin(along * (0.2 + 1.5 * wave))
    hue = torch.tensor(colour)
    leaf = (_GREY * hue[0] + (1 - _GREY) * hue).mul(200).add(28)[:, None, None] + light
    part.copy_(torch.where(down**2 + right**2 <= radius**2, leaf, part))


def _pixels(shape: Sequence[int], grid: Grid, geometry: Geometry, generator: torch.Generator) -> Pixels:
    """Pixels of `shape` as the tower lays them out: tiles, or one frame of patches."""
    if isinstance(geometry, TileGeometry):
        return _tiles(shape, generator)
    patch, merge = geometry.patch, 1 if geometry.raster else geometry.merge
    picture = dead_leaves(grid.h * patch, grid.w * patch, generator)
    blocks = picture.view(3, grid.h // merge, merge, patch, grid.w // merge, merge, patch)
    columns = (3, 6, 0) if geometry.channels_last else (0, 3, 6)
    rows = blocks.permute(1, 4, 2, 5, *columns).reshape(grid.h * grid.w, 3 * patch**2)
    return _bytes(rows.repeat(1, geometry.channels // 3))


def _tiles(shape: Sequence[int], generator: torch.Generator) -> Pixels:
    """Tiles `(tiles, 3, H, W)`, each a picture."""
    return _bytes(torch.stack([dead_leaves(shape[2], shape[3], generator) for _ in range(shape[0])]))


def _bytes(pixels: Tensor) -> Pixels:
    return Pixels(bytes(pixels.contiguous().numpy().data), DType.UINT8, tuple(pixels.shape))
