"""From tiles to rows, one class for each way of it."""

from typing import Any

from torch import Tensor

from vitwire_server.towers.family import Module, Parts, in_model, last_layer
from vitwire_server.towers.layouts.tiles import Encoder, View, module_heads, side

SHUFFLED = "1 divided by a whole number"
"""What `shuffles` asks for, in words."""


def shuffles(ratio: float, _: Any) -> bool:  # noqa: ANN401
    """Whether shuffling pixels by this ratio makes squares of patches to tokens."""
    return round(1 / ratio) * ratio == 1


def siglip(name: str) -> Module:
    """SigLIP's tower by this name, its weights within `vision_model.` or not; its pooling head is left out."""
    prefixes = in_model(f"{name}vision_model.", name)
    return Module(source="siglip.modeling_siglip:SiglipVisionModel", prefixes=prefixes, ignored=("head.",))


class InternVL(Encoder):
    """A ViT with a class token, pixel shuffle, then the projector."""

    def __init__(self, parts: Parts, config: Any) -> None:  # noqa: ANN401
        last_layer(config)
        vision = config.vision_config
        size = side(vision.image_size)
        self.patch = side(vision.patch_size)
        self.merge = round(1 / config.downsample_ratio)
        self._side = size // self.patch
        if self._side % self.merge:
            raise ValueError(f"{self._side} patches a side cannot be merged by {self.merge}")
        self.view = View(size, size, (self._side // self.merge) ** 2)
        self.channels = vision.num_channels
        self.width = config.text_config.hidden_size
        self.heads = module_heads(vision)
        self._tower: Any = parts["tower"]
        self._projector = parts["projector"]
        self.blocks = list(self._tower.encoder.layer)

    def encode(self, tiles: Tensor) -> Tensor:
        patches: Tensor = self._tower(pixel_values=tiles).last_hidden_state[:, 1:]
        return self._projector(self._shuffled(patches))  # type: ignore[no-any-return]

    def _shuffled(self, patches: Tensor) -> Tensor:
        """`(tiles, side * side, C)` to `(tiles, tokens, C * merge * merge)`, patches of a token one after the other."""
        merge, short = self.merge, self._side // self.merge
        tokens: Tensor = patches.unflatten(1, (short, merge, short, merge)).permute(0, 1, 3, 2, 4, 5)
        return tokens.flatten(3).flatten(1, 2)


class Siglip(Encoder):
    """A SigLIP tower without its head, and a projector of every patch."""

    def __init__(self, parts: Parts, config: Any) -> None:  # noqa: ANN401
        last_layer(config)
        vision = config.vision_config
        self.patch = vision.patch_size
        self.merge = 1
        self.view = View(vision.image_size, vision.image_size, (vision.image_size // self.patch) ** 2)
        self.channels = vision.num_channels
        self.width = config.text_config.hidden_size
        self.heads = module_heads(vision)
        self._tower: Any = parts["tower"]
        self._projector = parts["projector"]
        self.blocks = list(self._tower.encoder.layers)

    def encode(self, tiles: Tensor) -> Tensor:
        return self._projector(self._tower(pixel_values=tiles).last_hidden_state)  # type: ignore[no-any-return]


class LlavaOnevision(Siglip):
    """As published: rows of SigLIP's last layer before its final norm.

    The strategy `default` leaves out the first row of a tile, which is a class token in other towers.
    """

    def __init__(self, parts: Parts, config: Any) -> None:  # noqa: ANN401
        super().__init__(parts, config)
        self._left_out = int(config.vision_feature_select_strategy == "default")
        self.view = self.view._replace(tokens=self.view.tokens - self._left_out)

    def encode(self, tiles: Tensor) -> Tensor:
        patches = self._tower.encoder(inputs_embeds=self._tower.embeddings(tiles)).last_hidden_state
        return self._projector(patches[:, self._left_out :])  # type: ignore[no-any-return]


class Gemma3(Siglip):
    """The projector pools patches to a fixed number of tokens."""

    def __init__(self, parts: Parts, config: Any) -> None:  # noqa: ANN401
        super().__init__(parts, config)
        tokens: int = config.mm_tokens_per_image
        self.view = self.view._replace(tokens=tokens)
        self.merge = self.view.height // self.patch // round(tokens**0.5)


class Llama4(Encoder):
    """A ViT whose adapter shuffles pixels; its class token comes last and is dropped."""

    def __init__(self, parts: Parts, config: Any) -> None:  # noqa: ANN401
        vision = config.vision_config
        self.patch = vision.patch_size
        self.merge = round(1 / vision.pixel_shuffle_ratio)
        patches = vision.image_size // self.patch
        if patches % self.merge:
            raise ValueError(f"{patches} patches a side cannot be merged by {self.merge}")
        self.view = View(vision.image_size, vision.image_size, (patches // self.merge) ** 2)
        self.channels = vision.num_channels
        self.width = config.text_config.hidden_size
        self.heads = module_heads(vision)
        self._tower: Any = parts["tower"]
        self._projector = parts["projector"]
        self.blocks = list(self._tower.model.layers)

    def encode(self, tiles: Tensor) -> Tensor:
        rows: Tensor = self._tower(pixel_values=tiles).last_hidden_state
        return self._projector(rows)  # type: ignore[no-any-return]
