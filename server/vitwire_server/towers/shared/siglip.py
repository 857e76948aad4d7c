"""SigLIP's tower for tiles, with a projector of every patch."""

from typing import Any

from torch import Tensor

from vitwire_server.towers.configs import Config, last_layer
from vitwire_server.towers.family import Module, Parts, in_model
from vitwire_server.towers.layouts.tiles import Encoder, TileShape, module_heads


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
        self.merge = 1
        self.tile = TileShape(vision.image_size, vision.image_size, (vision.image_size // self.patch) ** 2)
        self.channels = vision.num_channels
        self.width = config.text_config.hidden_size
        self.heads = module_heads(vision)
        self._tower: Any = parts["tower"]
        self._projector = parts["projector"]
        self.blocks = list(self._tower.encoder.layers)

    def encode(self, tiles: Tensor) -> Tensor:
        return self._projector(self._tower(pixel_values=tiles).last_hidden_state)  # type: ignore[no-any-return]
