"""Llama 4 and Llama 3.2 Vision (Meta)."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface

from vitwire_server.core.footprints import LayoutFootprints
from vitwire_server.core.geometries import LayoutGeometry
from vitwire_server.core.grids import Grid
from vitwire_server.core.models import Preprocessing
from vitwire_server.core.tilings import Overview, Tiling, TilingRule
from vitwire_server.towers.configs import Config, Served, require
from vitwire_server.towers.family import Parts, in_model
from vitwire_server.towers.layouts.assembled import AssembledEncoder, UnitInput
from vitwire_server.towers.layouts.tiles import TileFamily, Unit, side
from vitwire_server.towers.processors.settings import BILINEAR, HALF, images, whole
from vitwire_server.towers.processors.tiles import fits_tower, tiled
from vitwire_server.towers.shared.parts import projector, stock
from vitwire_server.towers.shared.projected_tiles import SHUFFLED, ProjectedTiles, shuffles


def _llama4_settings(image: Mapping[str, Any], config: Config) -> Preprocessing:
    size = config.vision_config.image_size
    if image.get("resize_to_max_canvas"):
        raise ValueError("unsupported resize_to_max_canvas")
    tiling = Tiling(TilingRule.CANVAS, (size, size), overview=Overview.LAST, max_tiles=whole(image, "max_patches", 16))
    return tiled(image, tiling, HALF, BILINEAR)


def _mllama_settings(image: Mapping[str, Any], config: Config) -> Preprocessing:
    vision = config.vision_config
    size, most = side(vision.image_size), whole(image, "max_image_tiles", 4)
    require("max_image_tiles", most, vision.max_num_tiles, field="vision_config.max_num_tiles")
    fits_tower(image, size)
    tiling = Tiling(TilingRule.CANVAS, (size, size), max_tiles=most)
    return tiled(image, tiling, HALF, BILINEAR)


def _fill_output(layers: Sequence[int], vision: Config) -> bool:
    """True if the output has the columns of all states that it joins: after each of these layers and the last."""
    states = range(vision.num_hidden_layers)
    return (
        all(layer in states for layer in layers) and vision.vision_output_dim == (len(layers) + 1) * vision.hidden_size
    )


_PADDED_ATTENTION = "vitwire_padded"
_MULTIPLE = 8
"""Rows of a tile are padded to a multiple of it."""


def _attend_padded(
    _: nn.Module, query: Tensor, key: Tensor, value: Tensor, held: Tensor | None, *, scaling: float, **__: object
) -> tuple[Tensor, None]:
    """Attention in transformers' signature; rows `held[i]` and later of image `i` attend only to the rows before."""
    allowed = None
    if held is not None:
        padding = torch.arange(query.shape[2], device=held.device) >= held[:, None]
        allowed = ~(padding[:, None, :, None] & padding[:, None, None, :])
    attended = functional.scaled_dot_product_attention(query, key, value, attn_mask=allowed, scale=scaling)
    return attended.transpose(1, 2), None


AttentionInterface.register(_PADDED_ATTENTION, _attend_padded)


class Mllama(AssembledEncoder, ProjectedTiles):
    """Tiles of an image attend to each other, and to those that it could have beyond: blank ones with positions.

    Only the tiles that it comes with give rows. Rows of blank tiles, and those that fill up a tile, are padding, which
    attends to the other rows only. It is moved behind them, so that their number replaces transformers' mask of all
    pairs.
    """

    def __init__(self, parts: Parts, config: Config) -> None:
        super().__init__(parts, config, layers="transformer.layers")
        vision = config.vision_config
        positions = self.tile.tokens + 1
        self.tile = self.tile._replace(tokens=positions)
        self._layouts = tuple((rows, columns) for rows, columns in vision.supported_aspect_ratios)
        self._most = vision.max_num_tiles
        if max(rows * columns for rows, columns in self._layouts) > self._most:
            raise ValueError(f"supported_aspect_ratios has layouts of more than {self._most} tiles")
        self.blocks = [*self.blocks, *self._tower.global_transformer.layers]
        self._tower.config._attn_implementation = _PADDED_ATTENTION  # noqa: SLF001 - as transformers' users set it
        self._joined = vision.intermediate_layers_indices
        longest = self._most * (positions - 1)
        self.footprint = LayoutFootprints(positions, self._most, longest)
        self.unit = Unit(self._most, self._most * positions, self._most * positions, longest)
        self.inputs = {
            "tiles": UnitInput((self._most,), torch.int64, counts_tiles=True),
            "held": UnitInput((self._most,), torch.int64),
            "aspect_ratio": UnitInput((1,), torch.int64),
        }

    @cached_property
    def geometry(self) -> LayoutGeometry:
        return LayoutGeometry(**{**asdict(super().geometry), "layouts": self._layouts, "most": self._most})

    def sample(self, units: int) -> Grid:
        del units
        rows, columns = max(self._layouts, key=lambda layout: layout[0] * layout[1])
        return Grid(rows * columns, rows, columns)

    def lay(self, grid: Grid) -> tuple[Mapping[str, Tensor], Tensor]:
        """Which tiles there are, and the number of the layout; 0 is the number of no image."""
        places, own = torch.arange(self._most), grid.h * grid.w
        number = 1 + self._layouts.index((grid.h, grid.w))
        laid = {
            "tiles": places.clamp(max=own - 1)[None],
            "held": (places < own).long()[None],
            "aspect_ratio": torch.tensor([[number]]),
        }
        return laid, torch.arange(grid.t * self.tile.tokens)

    def encode_units(self, tiles: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        held, ratio, tower = inputs["held"], inputs["aspect_ratio"], self._tower
        pictures = tiles.index_select(0, inputs["tiles"].flatten())
        blank = pictures.masked_fill(held.logical_not().flatten()[:, None, None, None], 0)
        patches = tower.patch_embedding(blank).flatten(2).transpose(1, 2)
        patches = tower.pre_tile_positional_embedding(patches.unflatten(0, held.shape), ratio)
        rows = tower.apply_class_embedding(patches.flatten(0, 1)).unflatten(0, held.shape)
        rows = tower.layernorm_pre(tower.gated_positional_embedding(rows, ratio))
        filled = functional.pad(rows, (0, 0, 0, -rows.shape[2] % _MULTIPLE))

        padding = held.logical_not()[:, :, None] | (torch.arange(filled.shape[2], device=held.device) >= rows.shape[2])
        order = padding.flatten(1).int().argsort(dim=1, stable=True)
        real = padding.logical_not().flatten(1).sum(1, dtype=torch.int32).clamp(min=1)  # for slots without an image
        place = order.argsort(dim=1)

        def moved(rows: Tensor, places: Tensor) -> Tensor:
            return rows.take_along_dim(places[:, :, None], dim=1)

        states, kept = moved(filled.flatten(1, 2), order), {}
        for number, layer in enumerate(tower.transformer.layers):
            states = layer(states, attention_mask=real)
            if number in self._joined:
                kept[number] = states
        tiled = moved(tower.layernorm_post(states), place).unflatten(1, filled.shape[1:3])
        states = moved(tower.post_tile_positional_embedding(tiled, ratio).flatten(1, 2), order)
        for layer in tower.global_transformer.layers:
            states = layer(states, attention_mask=real)
        joined = torch.stack([kept[number] for number in self._joined], dim=-1).flatten(2)
        found = moved(torch.cat([states, joined], dim=-1), place).unflatten(1, filled.shape[1:3])
        return self._projector(found[:, :, : rows.shape[2]].flatten(1, 2))  # type: ignore[no-any-return]


ROWS = (
    TileFamily(
        "llama4",
        "Llama 4",
        tower=stock(
            "llama4.Llama4VisionModel",
            in_model("vision_model."),
            served=(Served("pixel_shuffle_ratio", shuffles, SHUFFLED),),
        ),
        beside=projector("llama4.Llama4MultiModalProjector"),
        # The adapter shuffles pixels; the class token comes last and is dropped.
        encoder=partial(ProjectedTiles, merged_by="vision_config.pixel_shuffle_ratio", layers="model.layers"),
        processor=images(_llama4_settings),
    ),
    TileFamily(
        "mllama",
        "Llama 3.2 Vision",
        tower=stock(
            "mllama.MllamaVisionModel",
            in_model("vision_model."),
            served=(
                Served(
                    "intermediate_layers_indices",
                    _fill_output,
                    "numbers of layers, as many as make vision_output_dim columns with the last one's",
                ),
            ),
        ),
        beside=projector(
            nn.Linear,
            arguments=lambda config: (config.vision_config.vision_output_dim, config.text_config.hidden_size),
        ),
        encoder=Mllama,
        processor=images(_mllama_settings),
    ),
)
