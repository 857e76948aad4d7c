"""Square tiles through a stock tower, and a projector of its rows; pixel shuffle; chosen layers of CLIP's kin."""

import torch
from torch import Tensor

from vitwire_server.towers.configs import Config, Served, at, last_layer
from vitwire_server.towers.family import Module, Parts, in_model
from vitwire_server.towers.layouts.tiles import TileShape, TileTower, heads_of, merged_tile, side

SHUFFLED = "1 divided by a whole number"
"""The values that `shuffles` accepts, in words."""
MLP1 = {"mlp1.0.": "layer_norm.", "mlp1.1.": "linear_1.", "mlp1.3.": "linear_2."}
"""Prefixes of the projector after a pixel shuffle, in checkpoints that follow OpenGVLab's layout."""


class ProjectedTiles(TileTower):
    """One token for each patch, or for each square of patches as the field at `merged_by` says.

    That field holds the patches a side of a square, or the share of a side that is left of them.
    """

    def __init__(
        self, parts: Parts, config: Config, *, merged_by: str = "", layers: str = "encoder.layers", width: str = ""
    ) -> None:
        """`layers` is the path of the tower's layers, `width` the path of the field with the columns of a token.

        Raises ValueError if the squares leave patches over, or if tokens are not made of the last layer.
        """
        super().__init__(parts, config)
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
        self.blocks = list(self._tower.get_submodule(layers))

    def encode(self, tiles: Tensor) -> Tensor:
        rows: Tensor = self._projector(self.features(tiles))
        return rows.flatten(1, -2)

    def features(self, tiles: Tensor) -> Tensor:
        """`(tiles, C, H, W)` to what is projected."""
        return self._tower(pixel_values=tiles).last_hidden_state  # type: ignore[no-any-return]


class Shuffled(ProjectedTiles):
    """Pixel shuffle before the projector; a class token, which InternVL's tower puts first, is left out."""

    def features(self, tiles: Tensor) -> Tensor:
        patches = self.tile.tokens * self.merge**2
        return shuffled(super().features(tiles)[:, -patches:], self.merge)


class ProjectedLayers(TileTower):
    """Rows of chosen layers of CLIP's or SigLIP's tower, side by side, and a projector, as LLaVA has it.

    The configuration names the layers as transformers numbers hidden states, before the last norm: 0 is before the
    first layer, -1 after the last one. The strategy `default` leaves out the first row of a tile, which is CLIP's
    class token, and on SigLIP a patch. The projector may make one row of a square of patches.
    """

    def __init__(self, parts: Parts, config: Config) -> None:
        """Raises ValueError over a layer that the tower does not have."""
        super().__init__(parts, config)
        vision, layers = config.vision_config, config.vision_feature_layer
        held = list(self._tower.encoder.layers)
        self._chosen = [_number(layer, len(held)) for layer in ([layers] if isinstance(layers, int) else layers)]
        self._left_out = int(getattr(config, "vision_feature_select_strategy", "default") == "default")
        self.blocks = held[: max(self._chosen)]
        self.patch, self.merge = vision.patch_size, getattr(config, "downsample_factor", 1)
        rows = self._tower.embeddings.position_embedding.num_embeddings - self._left_out
        self.tile = TileShape(vision.image_size, vision.image_size, rows // self.merge**2)
        self.channels = vision.num_channels
        self.width = config.text_config.hidden_size
        self.attention_heads = heads_of(vision)

    def encode(self, tiles: Tensor) -> Tensor:
        return self.projected(self.features(tiles))

    def features(self, tiles: Tensor) -> Tensor:
        """`(tiles, C, H, W)` to `(tiles, rows, columns)` before they are projected."""
        states: Tensor = self._tower.embeddings(tiles)
        if hasattr(self._tower, "pre_layrnorm"):  # CLIP's; spelled so in every checkpoint
            states = self._tower.pre_layrnorm(states)
        kept = {0: states}
        for number, block in enumerate(self.blocks, start=1):
            states = block(states, None)
            if number in self._chosen:
                kept[number] = states
        return torch.cat([kept[number] for number in self._chosen], dim=-1)[:, self._left_out :]

    def projected(self, rows: Tensor) -> Tensor:
        """To `(tiles, tokens, width)`."""
        own: Tensor = self._projector(rows)
        return own.flatten(1, -2)


def _number(layer: int, layers: int) -> int:
    if not -layers - 1 <= layer <= layers:
        raise ValueError(f"unsupported vision_feature_layer {layer}: the tower has {layers} layers")
    return layer % (layers + 1)


def clip(name: str) -> Module:
    """CLIP's tower by this name, its weights within `vision_model.` or not; older files hold its position ids too."""
    return Module(
        source="clip.modeling_clip:CLIPVisionModel",
        prefixes=in_model(f"{name}vision_model.", name),
        ignored=("embeddings.position_ids",),
    )


def whole_squares(field: str) -> Served:
    """Requires that squares of patches, whose side is in this field, leave no patch of a tile over."""

    def divides(squares: int, config: Config) -> bool:
        vision = getattr(config, "vision_config", config)
        return side(vision.image_size) // side(vision.patch_size) % squares == 0

    return Served(field, divides, "a divisor of image_size / patch_size")


def shuffles(ratio: float, _: Config) -> bool:
    """True if shuffling pixels by this ratio makes squares of patches to tokens."""
    return round(1 / ratio) * ratio == 1


def shuffled(patches: Tensor, merge: int) -> Tensor:
    """`(tiles, side * side, C)` to `(tiles, tokens, C * merge * merge)`, patches of a token one after the other."""
    short = round(patches.shape[1] ** 0.5) // merge
    tokens: Tensor = patches.unflatten(1, (short, merge, short, merge)).permute(0, 1, 3, 2, 4, 5)
    return tokens.flatten(3).flatten(1, 2)
