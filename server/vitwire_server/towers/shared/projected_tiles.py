"""Square tiles through a stock tower, and a projector of what it returns."""

from typing import Any

from torch import Tensor

from vitwire_server.towers.configs import Config, Served, at, last_layer
from vitwire_server.towers.family import Parts
from vitwire_server.towers.layouts.tiles import Encoder, TileShape, heads_of, merged_tile, side


class ProjectedTiles(Encoder):
    """One token for each patch, or for each square of patches as the field at `merged_by` says.

    That field holds the patches a side of a square, or the share of a side that is left of them.
    """

    def __init__(
        self, parts: Parts, config: Config, *, merged_by: str = "", layers: str = "encoder.layers", width: str = ""
    ) -> None:
        """`layers` is the path of the tower's layers, `width` that of the field with the columns of a token.

        Raises ValueError if the squares leave patches over, or if tokens are not made of the last layer.
        """
        last_layer(config)
        vision = config.vision_config
        size, self.patch, self.merge = side(vision.image_size), side(vision.patch_size), 1
        self.tile = TileShape(size, size, (size // self.patch) ** 2)
        if merged_by:
            merged = at(config, merged_by)
            self.merge = round(1 / merged) if isinstance(merged, float) else merged
            self.tile = merged_tile(size, self.patch, self.merge, merged_by.rpartition(".")[2])
        self.channels = vision.num_channels
        self.width = at(config, width or "text_config.hidden_size")
        self.attention_heads = heads_of(vision)
        self._tower: Any = parts["tower"]
        self._projector: Any = parts.get("projector")
        self.blocks = list(self._tower.get_submodule(layers))

    def encode(self, tiles: Tensor) -> Tensor:
        rows: Tensor = self._projector(self.rows(tiles))
        return rows.flatten(1, -2)

    def rows(self, tiles: Tensor) -> Tensor:
        """`(tiles, C, H, W)` to what is projected."""
        return self._tower(pixel_values=tiles).last_hidden_state  # type: ignore[no-any-return]


def whole_squares(field: str) -> Served:
    """Requires that squares of patches, whose side is in this field, leave no patch of a tile over."""

    def divides(squares: int, config: Config) -> bool:
        vision = getattr(config, "vision_config", config)
        return side(vision.image_size) // side(vision.patch_size) % squares == 0

    return Served(field, divides, "a divisor of image_size / patch_size")
