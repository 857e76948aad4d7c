"""Similarity of a tower's rows to its plain forward: after a reduction to float8, or once compiled.

They are compared on pictures with the statistics of photographs, drawn from a seed: dead leaves, discs that hide each
other, their radii distributed so that no scale stands out. As in photographs, there are edges, shading, texture, noise
and flat regions, and detail is fainter the finer it is.
"""

from collections.abc import Sequence
from math import pi

import torch
from torch import Tensor

from vitwire_server.core.errors import EncoderError
from vitwire_server.core.grids import Grid
from vitwire_server.core.items import DType, Item, Modality, Pixels
from vitwire_server.core.models import Geometry, TileGeometry
from vitwire_server.runtime.engine import Engine
from vitwire_server.towers.tower import Tower

_TOKENS, _PICTURES = 768, 3
_LEAVES = 400
_SMALLEST, _LARGEST = 0.025, 0.4
"""Radii, as shares of the longer side."""
_NOISE = 4.0
_GREY = 0.6
"""Share of brightness in a colour."""


class Comparison:
    """The rows of a few pictures, before and after a change of the tower. Its forwards are eager."""

    def __init__(self, tower: Tower, engine: Engine) -> None:
        """Encodes the pictures. Raises EncoderError."""
        self._engine = engine
        self._parts = 1 + tower.geometry.levels
        self._items = picture_items(tower, tower.samples(_TOKENS, _PICTURES + 1))
        self._before = self._rows()

    def similarities(self) -> Tensor:
        """Of each row, the cosine of its least similar part, main or deepstack level; NaN if encoding fails."""
        try:
            after = self._rows()
        except EncoderError:
            return torch.full((len(self._before),), torch.nan, dtype=torch.float64)
        return least_cosines(self._before, after, self._parts)

    def _rows(self) -> Tensor:
        """Of all pictures. Each is encoded alone. Raises EncoderError."""
        return torch.cat([rows_of(self._engine, item) for item in self._items])


def rows_of(engine: Engine, item: Item) -> Tensor:
    """The rows `(rows, width)` of one item that asks for float32, encoded alone and eagerly. Raises EncoderError."""
    (result,) = engine.launch([item], None).collect().results
    if isinstance(result, EncoderError):
        raise result
    return torch.frombuffer(bytearray(result.data), dtype=torch.float32).view(result.shape)


def least_cosines(before: Tensor, after: Tensor, parts: int) -> Tensor:
    """Of each row `(rows, parts * columns)`, the least cosine similarity of its parts; `(rows,)` in float64.

    Two parts of zeros are the same, one of them is as far from the other as can be.
    """
    one, other = (rows.double().view(len(rows), parts, -1) for rows in (before, after))
    lengths = one.norm(dim=2) * other.norm(dim=2)
    cosines = (one * other).sum(2) / lengths
    same = (one == other).all(2)
    return torch.where(lengths == 0, same.double(), cosines).amin(1)


def norm_errors(expected: Tensor, rows: Tensor, parts: int) -> Tensor:
    """Of each row `(rows, parts * columns)`, the largest norm error of its parts; `(rows,)` in float64.

    The error of a part is the norm of its difference over the norm of what was expected: 0 where both are zeros,
    infinite where only the latter is.
    """
    one, other = (each.double().view(len(each), parts, -1) for each in (expected, rows))
    differences, norms = (one - other).norm(dim=2), one.norm(dim=2)
    return torch.where(differences == 0, differences, differences / norms).amax(1)


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
