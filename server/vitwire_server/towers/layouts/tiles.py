"""Towers that take tiles of one size: attention within each tile, a budget is a number of tiles."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn

from vitwire_server.core.budgets import Budget
from vitwire_server.core.capacities import Capacities, TileCapacities
from vitwire_server.core.footprints import Footprints, TileFootprints
from vitwire_server.core.grids import Grid
from vitwire_server.core.items import Modality, total
from vitwire_server.core.models import Preprocessing, TileGeometry
from vitwire_server.towers.configs import Config, at, changed
from vitwire_server.towers.family import Accepts, Family, Parts
from vitwire_server.towers.metadata import Capacity
from vitwire_server.towers.processors.settings import ReadProcessor, read_settings
from vitwire_server.towers.tower import Metadata, Tower


class TileShape(NamedTuple):
    """Sizes of one tile, or of one crop."""

    height: int
    width: int
    tokens: int
    """Rows that it becomes."""


class Unit(NamedTuple):
    """Sizes of what a budget counts: one tile, or several that are computed together."""

    tiles: int
    """Tiles at most."""
    tokens: int
    """Tokens that it takes of a budget."""
    rows: int
    """Rows that its forward gives, before items pick theirs."""
    longest: int
    """Patches that attend to each other."""


class TileTower(Tower):
    """From tiles to rows, on stock modules; padding is whole tiles, so a forward needs pixels only.

    Tiles attend densely, through torch's own kernels.
    """

    tile: TileShape
    patch: int
    merge: int
    """Root of the patches that become one token."""
    channels: int = 3
    width: int
    attention_heads: tuple[int, int]
    one_row: bool = False
    """A tile has one row, which is made of its tokens."""
    paired: ClassVar[bool] = False
    """Each tile comes with a crop."""
    merged: bool = False
    """Tiles of an image become as many rows whatever their number: the rows of one unit."""
    fewest: int = 1
    """Units of the smallest item."""
    segmented = False

    def __init__(self, parts: Parts, config: Config) -> None:
        """`parts` are the loaded modules, `config` the checkpoint's. Raises ValueError if it cannot compute them."""
        del config
        self.model = nn.ModuleDict(dict(parts))
        self.modules = {"model": self.model}
        self._tower: Any = parts["tower"]
        self._projector: Any = parts.get("projector")

    @abstractmethod
    def encode(self, tiles: Tensor) -> Tensor:
        """`(tiles, C, H, W)` to `(tiles, tokens, width)`, or `(tiles, 1, width)` with `one_row`.

        Never synchronises with the host.
        """

    @cached_property
    def geometry(self) -> TileGeometry:
        """Sizes that clients and codec need to know."""
        return TileGeometry(
            patch=self.patch,
            merge=self.merge,
            temporal=1,
            channels=self.channels,
            width=self.width,
            levels=0,
            one_row=self.one_row,
            tile=(self.tile.height, self.tile.width),
            merged=self.merged,
        )

    @cached_property
    def unit(self) -> Unit:
        """One tile."""
        return Unit(1, self.tile.tokens, self.tile.tokens, self.geometry.patches(Grid(1, 1, 1)))

    @cached_property
    def footprint(self) -> Footprints:
        rows = self.unit.rows if self.merged else 0
        return TileFootprints(self.unit.tokens, self.unit.longest, self.paired, self.one_row, rows)

    @cached_property
    def capacities(self) -> Capacities:
        return TileCapacities(self.unit.tokens, self.unit.longest, paired=self.paired, fewest=self.fewest)

    def sizes(self, most: int) -> list[int]:
        tokens = self.unit.tokens
        return [units * tokens for units in tile_steps(most // tokens) if units >= self.fewest]

    def sample(self, units: int) -> Grid:
        """An image of this many units, or of as many as an image can have."""
        return Grid(units, 1, units - self.merged)

    def samples(self, tokens: int, items: int) -> list[Grid]:
        """At most `items` images that together have as many units as go into `tokens`, or the smallest image."""
        units = max(self.fewest, tokens // self.unit.tokens)
        alone = min(units // self.fewest, items) - 1
        return [self.sample(self.fewest)] * alone + [self.sample(units - alone * self.fewest)]

    def capacity(self, budget: Budget) -> Capacity:
        units = budget.tokens // self.unit.tokens
        longest, crops = budget.max_segment_patches, budget.max_crops
        return Capacity(units * self.unit.tiles, budget.tokens, units, longest, crops=crops)

    def rows(self, capacity: Capacity) -> int:
        return capacity.patches if self.one_row else capacity.tokens

    def reserve(self, capacity: Capacity) -> Metadata:
        return Metadata(capacity, {}, {})

    def prepare(self, grids: Sequence[Grid], metadata: Metadata) -> None:
        load, capacity = total([self.footprint(grid) for grid in grids]), metadata.capacity
        if load.patches > capacity.patches or load.crops > capacity.crops or load.segments > capacity.segments:
            held = f"{load.patches} tiles and {load.crops} crops in {load.segments} units of tiles"
            raise ValueError(f"{held} do not fit {capacity}")

    def forward(self, pixels: Tensor, metadata: Metadata) -> Tensor:
        del metadata
        return self.encode(self.tiles(pixels)).flatten(0, 1).contiguous()

    def tiles(self, pixels: Tensor) -> Tensor:
        """Rows of pixels as `(tiles, C, H, W)`."""
        return pixels.view(-1, self.channels, *self.geometry.tile)


class PairEncoder(TileTower):
    """Tiles that come in two sizes and become one embedding: as many crops as tiles, in a budget as in an item."""

    crop: tuple[int, int]
    paired = True

    @abstractmethod
    def encode_pairs(self, tiles: Tensor, crops: Tensor) -> Tensor:
        """`(tiles, C, H, W)` and `(tiles, C, h, w)` to `(tiles, tokens, width)`."""

    @cached_property
    def geometry(self) -> TileGeometry:
        return replace(super().geometry, crop=self.crop)

    def forward(self, pixels: Tensor, metadata: Metadata) -> Tensor:
        assert metadata.crops is not None, "this tower is run with crops"
        crops = metadata.crops.view(-1, self.channels, *self.crop)
        return self.encode_pairs(self.tiles(pixels), crops).flatten(0, 1)


@dataclass(frozen=True, kw_only=True)
class TileFamily(Family):
    """The differences between towers of tiles: from tiles to rows, and from images to tiles."""

    encoder: Callable[[Parts, Config], TileTower]
    """From the loaded modules and the checkpoint's configuration. Raises ValueError if it cannot compute them."""
    processor: ReadProcessor
    videos: Accepts = Accepts.NOTHING
    within: str = ""
    """Path of the configuration with the tower and the width of rows, in checkpoints of a larger model."""
    layout = "tiles"

    def read_config(self, folder: Path, settings: Mapping[str, Any]) -> Config:
        """See Family: the part that `within` names. SigLIP's pooling head, which no rows pass through, is left out."""
        whole = super().read_config(folder, settings)
        config = changed(at(whole, self.within), {"dtype": whole.dtype}) if self.within else whole
        # SiglipVisionConfig of transformers 5.17 does not declare the field, whose default is true.
        if hasattr(config.vision_config, "vision_use_head") or config.vision_config.model_type == "siglip_vision_model":
            return changed(config, {"vision_config.vision_use_head": False})
        return config

    def build(self, parts: Parts, config: Config) -> TileTower:
        return self.encoder(parts, config)

    def preprocessing(self, folder: Path, config: Config) -> dict[Modality, Preprocessing]:
        own = self.processor
        return read_settings(folder, lambda files: own(files, config), in_code=self.in_code, converts=self.converts)


def tile_steps(most: int) -> list[int]:
    """Numbers of tiles up to `most`, in steps of about 1.4: 1, 2, 3, 4, 6, 8, 12, ..."""
    steps: list[int] = []
    tiles = 1
    while tiles < most:
        steps.append(tiles)
        tiles = max(tiles + 1, tiles * 3 // 2 if tiles & (tiles - 1) == 0 else ceil(tiles * 4 / 3))
    return [*steps, most] if most > 0 else []


def heads_of(config: Config) -> tuple[int, int]:
    """Attention heads of a vision configuration, and the size of one."""
    return config.num_attention_heads, config.hidden_size // config.num_attention_heads


def merged_tile(size: int, patch: int, merge: int, field: str) -> TileShape:
    """A square tile of which squares of `merge` patches a side become tokens, as `field` says. Raises ValueError."""
    patches = size // patch
    if patches % merge:
        raise ValueError(f"image_size / patch_size is {patches}, but must be a multiple of {merge} ({field})")
    return TileShape(size, size, (patches // merge) ** 2)


def side(value: int | list[int] | tuple[int, ...]) -> int:
    """One side of a square that a configuration gives as one number or two. Raises ValueError unless square."""
    sides = set(value) if isinstance(value, list | tuple) else {value}
    if len(sides) != 1:
        raise ValueError(f"{value} is not square")
    return int(sides.pop())
