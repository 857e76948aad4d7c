"""Vision transformers that are served alone: one tile an image, rows of its patches or one row pooled of them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from vitwire_server.core.items import Modality
from vitwire_server.core.models import Preprocessing, TileGeometry
from vitwire_server.towers.configs import Config, changed
from vitwire_server.towers.family import Family, Parts
from vitwire_server.towers.files import CheckpointError
from vitwire_server.towers.layouts.tiles import TileShape, TileTower, heads_of, side
from vitwire_server.towers.processors.settings import ProcessorFiles, read_settings, usable
from vitwire_server.towers.processors.tiles import class_of, one_tile


@dataclass(frozen=True, kw_only=True)
class PlainFamily(Family):
    """The differences between vision transformers that are served alone."""

    encoder: "Callable[[PlainFamily, Parts, Config], PlainEncoder]"
    layers: str = "encoder.layers"
    """Path of the tower's layers."""
    leading: int | Callable[[Config], int] = 1
    """Tokens before the patches, such as a class token: their number, or a function of the tower's configuration."""
    head: str | None = None
    """Field of the tower's configuration that says whether it has a pooling head, which is loaded on its own."""
    processor: str
    """Class of the model's processor, by the beginning of its name, if the checkpoint names none."""
    resizes: bool = False
    """The tower takes tiles of the size that the processor makes, rather than of image_size only."""
    layout = "tiles"

    def read_config(self, folder: Path, settings: Mapping[str, Any]) -> Config:
        """See Family. Adds `tile`, the size of a tile, and `has_head`. Raises ValueError or CheckpointError."""
        config = super().read_config(folder, settings)
        vision = self.tower.configuration(config)
        files = ProcessorFiles.read(folder, required=True)
        with usable(files.image_path):
            tiling = one_tile(files, self.processor).tiling
        assert tiling is not None, "a processor of one tile has a tiling"
        size, name = side(vision.image_size), files.image_path.name
        if not self.resizes and tiling.tile != (size, size):
            raise CheckpointError(f"{folder}: image_size is {size}, but {name} makes tiles of {tiling.tile}")
        if min(tiling.tile) < side(vision.patch_size):
            raise ValueError(f"{name} makes tiles of {tiling.tile}, which hold no patch of patch_size")
        fields: dict[str, object] = {"tile": tiling.tile, "has_head": False}
        if self.head:
            path = f"{self.tower.config}.{self.head}".removeprefix(".")
            fields |= {"has_head": bool(getattr(vision, self.head, True)), path: False}
        return changed(config, fields)

    def build(self, parts: Parts, config: Config) -> TileTower:
        return self.encoder(self, parts, config)

    def preprocessing(self, folder: Path, config: Config) -> dict[Modality, Preprocessing]:
        """See Family. A frame of a clip is prepared as an image is."""
        del config

        def settings(files: ProcessorFiles) -> dict[Modality, Preprocessing]:
            return dict.fromkeys((Modality.IMAGE, Modality.VIDEO), one_tile(files, self.processor))

        converts = class_of(ProcessorFiles.read(folder), self.processor).converts
        found = read_settings(folder, settings, converts=converts)
        drops = found[Modality.IMAGE].drops_transparency
        return {modality: replace(own, drops_transparency=drops) for modality, own in found.items()}


class PlainEncoder(TileTower):
    """A stock tower, which returns its tokens: class and register tokens first, then the patches, line by line."""

    def __init__(self, family: PlainFamily, parts: Parts, config: Config) -> None:
        super().__init__(parts, config)
        vision = family.tower.configuration(config)
        self.patch, self.merge = side(vision.patch_size), 1
        height, width = config.tile
        self.tile = TileShape(height, width, (height // self.patch) * (width // self.patch))
        self.channels = vision.num_channels
        self.width = vision.hidden_size
        self.attention_heads = heads_of(vision)
        self._leading = family.leading if isinstance(family.leading, int) else family.leading(vision)
        self._pool = family.pooler.make(parts, config) if family.pooler else None
        self.one_row = bool(self._pool)
        self.blocks = list(self._tower.get_submodule(family.layers))

    @cached_property
    def geometry(self) -> TileGeometry:
        bare = super().geometry
        return replace(bare, width=self._pool.width) if self._pool else bare

    def tokens(self, tiles: Tensor) -> Tensor:
        """`(tiles, C, H, W)` to all tokens, `(tiles, leading + patches, width)`."""
        states: Tensor = self._tower(pixel_values=tiles).last_hidden_state
        return states

    def encode(self, tiles: Tensor) -> Tensor:
        states = self.tokens(tiles)
        leading, patches = states[:, : self._leading], states[:, self._leading :]
        return self._pool.row(leading, patches).unsqueeze(1) if self._pool else patches
