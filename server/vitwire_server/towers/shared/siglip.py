"""SigLIP's tower for tiles, with a projector of every patch."""

from typing import Any

from torch import Tensor

from vitwire_server.towers.configs import Config, last_layer
from vitwire_server.towers.family import Module, Parts, in_model
from vitwire_server.towers.layouts.tiles import Encoder, TileShape, heads_of


def siglip(name: str) -> Module:
    """SigLIP's tower by this name, its weights within `vision_model.` or not; its pooling head is left out."""
    prefixes = in_model(f"{name}vision_model.", name)
    return Module(source="siglip.modeling_siglip:SiglipVisionModel", prefixes=prefixes, ignored=("head.",))


class Siglip(Encoder):
    """A SigLIP tower without its head, and a projector of every patch."""

    def __init__(self, parts: Parts, config: Config) -> None:
        last_layer(config)
        vision = config.vision_config
        self.patch = vision.patch_size
        side = vision.image_size // self.patch
        self.merge = self._merge(config, side)
        self.tile = TileShape(vision.image_size, vision.image_size, (side // self.merge) ** 2)
        self.channels = vision.num_channels
        self.width = config.text_config.hidden_size
        self.attention_heads = heads_of(vision)
        self._tower: Any = parts["tower"]
        self._projector = parts["projector"]
        self.blocks = list(self._tower.encoder.layers)

    def _merge(self, config: Config, side: int) -> int:
        """Root of the patches that the projector makes one token of; `side` is the patches a side of a tile."""
        del config, side
        return 1

    def encode(self, tiles: Tensor) -> Tensor:
        rows: Tensor = self._projector(self._tower(pixel_values=tiles).last_hidden_state)
        return rows.flatten(1, -2)
