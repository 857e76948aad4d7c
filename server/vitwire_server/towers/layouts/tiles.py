"""Towers that take tiles of one size: attention within each tile, a budget is a number of tiles."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

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


class Encoder(ABC):
    """From tiles to rows, on stock modules. `encode` never synchronises with the host."""

    tile: TileShape
    patch: int
    merge: int
    """Root of the patches that become one token."""
    channels: int = 3
    width: int
    attention_heads: tuple[int, int]
    """Their number, and the size of one."""
    blocks: Sequence[nn.Module]
    one_row: bool = False
    """A tile has one row, which is made of its tokens."""
    constants: Mapping[str, nn.Module] = MappingProxyType({})
    """Modules beside the loaded ones, which move with them."""

    @abstractmethod
    def encode(self, tiles: Tensor) -> Tensor:
        """`(tiles, C, H, W)` to `(tiles, tokens, width)`, or `(tiles, 1, width)` with `one_row`."""

    def tower(self, parts: Parts) -> "TileTower":
        """The tower that runs it; `parts` are the loaded modules."""
        return TileTower(self, parts)

    @property
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
        )


@dataclass(frozen=True, kw_only=True)
class TileFamily(Family):
    """What differs between towers of tiles: how a tile becomes rows, and how an image becomes tiles."""

    encoder: Callable[[Parts, Config], Encoder]
    """From the loaded modules and the checkpoint's configuration. Raises ValueError if it cannot compute them."""
    processor: ReadProcessor
    videos: Accepts = Accepts.NOTHING
    within: str = ""
    """Path of the configuration with the tower and the width of rows, in checkpoints where a larger model has it."""
    layout = "tiles"

    def read_config(self, folder: Path, settings: Mapping[str, Any]) -> Config:
        """See Family: the part that `within` names. SigLIP's pooling head, which no rows pass through, is left out."""
        whole = super().read_config(folder, settings)
        config = changed(at(whole, self.within), {"dtype": whole.dtype}) if self.within else whole
        # SiglipVisionConfig of transformers 5.17 does not declare the field, whose default is true.
        if hasattr(config.vision_config, "vision_use_head") or config.vision_config.model_type == "siglip_vision_model":
            return changed(config, {"vision_config.vision_use_head": False})
        return config

    def build(self, parts: Parts, config: Config) -> Tower:
        return self.encoder(parts, config).tower(parts)

    def preprocessing(self, folder: Path, config: Config) -> dict[Modality, Preprocessing]:
        return read_settings(folder, lambda files: self.processor(files, config), converts=self.converts)


class TileTower(Tower):
    """An encoder of tiles; padding is whole tiles, so a forward needs pixels only."""

    segmented = False

    def __init__(self, encoder: Encoder, parts: Parts) -> None:
        self.model = nn.ModuleDict({**parts, **encoder.constants})
        self.encoder = encoder
        self.geometry: TileGeometry = encoder.geometry

    @property
    def attention_heads(self) -> tuple[int, int]:
        return self.encoder.attention_heads

    @property
    def blocks(self) -> Sequence[nn.Module]:
        return self.encoder.blocks

    def use_attention(self, implementation: str) -> None:
        """Has no effect: tiles attend densely, through torch's own kernels."""

    @property
    def _longest(self) -> int:
        return self.geometry.patches(Grid(1, 1, 1))

    @cached_property
    def footprints(self) -> Footprints:
        return TileFootprints(self.encoder.tile.tokens, self._longest, one_row=self.encoder.one_row)

    def sizes(self, most: int) -> list[int]:
        return [tiles * self.encoder.tile.tokens for tiles in tile_steps(most // self.encoder.tile.tokens)]

    @property
    def capacities(self) -> Capacities:
        """The budgets that the tower can have."""
        return TileCapacities(self.encoder.tile.tokens, self._longest)

    def samples(self, tokens: int, items: int) -> list[Grid]:
        """At most `items` images that together have as many tiles as go into `tokens`, one at least."""
        tiles = max(1, tokens // self.encoder.tile.tokens)
        alone = min(tiles, items) - 1
        return [Grid(1, 1, 1)] * alone + [Grid(tiles - alone, 1, tiles - alone)]

    def capacity(self, budget: Budget) -> Capacity:
        tiles = budget.tokens // self.encoder.tile.tokens
        return Capacity(tiles, budget.tokens, tiles, budget.max_segment_patches)

    def exact(self, grids: Sequence[Grid]) -> Capacity:
        load = total([self.footprint(grid) for grid in grids])
        return Capacity(load.patches, load.tokens, load.segments, load.longest, crops=load.crops)

    def rows(self, capacity: Capacity) -> int:
        return capacity.patches if self.encoder.one_row else capacity.tokens

    def reserve(self, capacity: Capacity) -> Metadata:
        return Metadata(capacity, {}, {})

    def prepare(self, grids: Sequence[Grid], metadata: Metadata) -> None:
        load = total([self.footprint(grid) for grid in grids])
        if load.patches > metadata.capacity.patches or load.crops > metadata.capacity.crops:
            raise ValueError(f"{load.patches} tiles and {load.crops} crops do not fit {metadata.capacity}")

    def forward(self, pixels: Tensor, metadata: Metadata) -> Tensor:
        del metadata
        tiles = pixels.view(-1, self.geometry.channels, *self.geometry.tile)
        return self.encoder.encode(tiles).flatten(0, 1).contiguous()


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
