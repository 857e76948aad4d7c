"""Rows of chosen layers of CLIP's or SigLIP's tower, and a projector, as LLaVA has it."""

from typing import Any

from torch import Tensor

from vitwire_server.towers.configs import Config
from vitwire_server.towers.family import Parts
from vitwire_server.towers.layouts.tiles import Encoder, TileShape, heads_of
from vitwire_server.towers.shared.clip import LayerRows


class ProjectedLayers(Encoder):
    """The configuration names the layers, and the squares of patches that the projector makes one row of.

    The strategy `default` leaves out the first row of a tile, which is CLIP's class token, and on SigLIP a patch.
    """

    def __init__(self, parts: Parts, config: Config) -> None:
        vision = config.vision_config
        self._tower: Any = parts["tower"]
        self._layers = LayerRows(self._tower, config.vision_feature_layer)
        self._left_out = int(getattr(config, "vision_feature_select_strategy", "default") == "default")
        self._projector = parts["projector"]
        self.blocks = self._layers.blocks
        self.patch, self.merge = vision.patch_size, getattr(config, "downsample_factor", 1)
        rows = self._tower.embeddings.position_embedding.num_embeddings - self._left_out
        self.tile = TileShape(vision.image_size, vision.image_size, rows // self.merge**2)
        self.channels = vision.num_channels
        self.width = config.text_config.hidden_size
        self.attention_heads = heads_of(vision)

    def encode(self, tiles: Tensor) -> Tensor:
        return self.projected(self.rows(tiles))

    def rows(self, tiles: Tensor) -> Tensor:
        """`(tiles, C, H, W)` to `(tiles, rows, columns)` before they are projected."""
        return self._layers(tiles)[:, self._left_out :]

    def projected(self, rows: Tensor) -> Tensor:
        """To `(tiles, tokens, width)`."""
        own: Tensor = self._projector(rows)
        return own.flatten(1, -2)
