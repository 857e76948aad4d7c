"""Aria (Rhymes AI) and Moondream 3 (M87 Labs): SigLIP on tiles, whose rows depend on how they show the image."""

from collections.abc import Mapping
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitwire_server.core.footprints import TileFootprints
from vitwire_server.core.geometries import MarginGeometry
from vitwire_server.core.grids import Grid
from vitwire_server.core.models import Preprocessing
from vitwire_server.core.tilings import Tiling, TilingRule
from vitwire_server.towers.configs import Config, Served, dtype_of, require
from vitwire_server.towers.family import Parts, in_model, stripped
from vitwire_server.towers.layouts.assembled import AssembledEncoder, UnitInput
from vitwire_server.towers.layouts.tiles import TileFamily, Unit
from vitwire_server.towers.processors.settings import HALF, LANCZOS, images, whole
from vitwire_server.towers.processors.tiles import tiled
from vitwire_server.towers.shared.parts import part, projector, stock
from vitwire_server.towers.shared.projected_tiles import ProjectedTiles
from vitwire_server.towers.shared.siglip import masked_states, siglip_config, siglip_of_blocks
from vitwire_server.towers.tower import Metadata


def _aria_settings(image: Mapping[str, Any], config: Config) -> Preprocessing:
    size = config.vision_config.image_size
    require("max_image_size", whole(image, "max_image_size", 980), size, field="vision_config.image_size")
    if image.get("split_image"):
        raise ValueError("unsupported split_image: send the parts of an image as separate images")
    smallest = whole(image, "min_image_size", 336)
    tiling = Tiling(TilingRule.CORNER, (size, size), min_side=smallest, patch=config.vision_config.patch_size)
    return tiled(image, tiling, HALF)


def _has_queries(queries: Mapping[int, int], config: Config) -> bool:
    vision = config.vision_config
    own = queries.get((vision.image_size // vision.patch_size) ** 2, 0)
    most: int = config.max_value_projector_patch_to_query_dict
    return 0 < own <= most


class Aria(AssembledEncoder, ProjectedTiles):
    """SigLIP, and queries that attend to its patches; neither attends to the margin."""

    def __init__(self, parts: Parts, config: Config) -> None:
        super().__init__(parts, config)
        self._side = self.tile.width // self.patch
        queries = config.projector_patch_to_query_dict[self._side**2]
        self.tile = self.tile._replace(tokens=queries)
        self.footprint = TileFootprints(queries, self._side**2)
        self.unit = Unit(1, queries, queries, self._side**2)
        self.inputs = {"attended": UnitInput((self._side, self._side), torch.bool, padding=1)}

    @cached_property
    def geometry(self) -> MarginGeometry:
        return MarginGeometry(**asdict(super().geometry))

    def sample(self, units: int) -> Grid:
        del units
        return Grid(1, self._side, self._side)

    def lay(self, grid: Grid) -> tuple[Mapping[str, Tensor], Tensor]:
        attended = torch.zeros(1, self._side, self._side, dtype=torch.bool)
        attended[:, : grid.h, : grid.w] = True
        return {"attended": attended}, torch.arange(self.unit.rows)

    def encode_units(self, tiles: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        attended = inputs["attended"]
        states = masked_states(self._tower, self.blocks, tiles, attended)
        return self._projector(states, attn_mask=~attended.flatten(1))  # type: ignore[no-any-return]


_FIELDS = {
    "crop_size": ("image_size", 378),
    "enc_dim": ("hidden_size", 1152),
    "enc_ff_dim": ("intermediate_size", 4304),
    "enc_n_heads": ("num_attention_heads", 16),
    "enc_n_layers": ("num_hidden_layers", 27),
    "enc_patch_size": ("patch_size", 14),
    **{name: (name, default) for name, default in (("max_crops", 12), ("overlap_margin", 4), ("proj_inner_dim", 8192))},
}
"""By the authors' names of fields: SigLIP's names, and the defaults of the authors' code."""


def _moondream_config(_: Path, settings: Mapping[str, Any]) -> Config:
    own = {"vision": {}, "text": {}, **(settings.get("config") or {})}
    vision = {name: own["vision"].get(theirs, default) for theirs, (name, default) in _FIELDS.items()}
    side = vision["image_size"] // vision["patch_size"]
    for name, least, most in (("max_crops", 1, 1000), ("overlap_margin", 0, (side - 1) // 2)):
        if not isinstance(vision[name], int) or not least <= vision[name] <= most:
            raise ValueError(f"config.vision.{name} is {vision[name]!r}, but must be from {least} to {most}")
    # The authors pool crops to a square of as many rows as there are layers.
    require("config.vision.enc_n_layers", vision["num_hidden_layers"], side, field="crop_size / enc_patch_size")
    return siglip_config(
        {**vision, "layer_norm_eps": 1e-5}, width=own["text"].get("dim", 2048), dtype=dtype_of(settings)
    )


def _moondream_settings(image: Mapping[str, Any], config: Config) -> Preprocessing:
    vision = config.vision_config
    tile, margin = (vision.image_size, vision.image_size), vision.overlap_margin * vision.patch_size
    return tiled(image, Tiling(TilingRule.OVERLAPPING, tile, max_tiles=vision.max_crops, margin=margin), HALF, LANCZOS)


class Moondream(AssembledEncoder, ProjectedTiles):
    """SigLIP on the whole image and on crops that overlap; rows are the former's patches beside means of the latter's.

    The crops' patches without their margins are one grid, which is pooled to the side of a tile. A tile's share of each
    mean is its patches times the weights of their rows and of their columns. The first row is the embedding of the
    token with which prompts begin, since vLLM expects that of an image too.
    """

    fewest, merged = 2, True

    def __init__(self, parts: Parts, config: Config) -> None:
        super().__init__(parts, config)
        self._start, rows = parts["start"], 1 + self.tile.tokens
        self._side, self._margin = self.tile.width // self.patch, config.vision_config.overlap_margin
        self.unit = Unit(1, -(-rows // self.fewest), rows, self.tile.tokens)
        shares = UnitInput((2, self._side, self._side), torch.float32)
        self.inputs = {"shares": shares, "left": UnitInput((), torch.int64)}

    def lay(self, grid: Grid) -> tuple[Mapping[str, Tensor], Tensor]:
        """Of each tile, its shares and how many tiles of the image are left; the overview has no share."""
        shares = torch.zeros(grid.t, 2, self._side, self._side)
        shares[1:, 0] = self._shares(grid.h).repeat_interleave(grid.w, dim=0)
        shares[1:, 1] = self._shares(grid.w).repeat(grid.h, 1, 1)
        return {"shares": shares, "left": torch.arange(grid.t, 0, -1)}, torch.arange(self.unit.rows)

    def _shares(self, tiles: int) -> Tensor:
        """`(tiles, means, patches)`: each patch's share of each mean along one axis with this many tiles.

        Means are those of `torch.nn.functional.adaptive_avg_pool2d`.
        """
        side, margin = self._side, self._margin
        length = tiles * (side - 2 * margin) + 2 * margin
        means, places = torch.arange(side)[:, None], torch.arange(length)
        begin, end = means * length // side, -((means + 1) * length // -side)
        shares = ((places >= begin) & (places < end)) / (end - begin)
        own: Tensor = shares.unfold(1, side, side - 2 * margin).transpose(0, 1).clone()
        own[1:, :, :margin] = 0
        own[:-1, :, side - margin :] = 0
        return own

    def forward(self, pixels: Tensor, metadata: Metadata) -> Tensor:
        rows = self._projector(super().forward(pixels, metadata))
        return torch.where((metadata.tensors["order"] % self.unit.rows == 0)[:, None], self._start.weight, rows)

    def encode_units(self, tiles: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        """`(tiles, 1 + patches, 2 C)`, zeros first: a tile's patches, and sums of shares in this and later tiles.

        Computed in float32. Sums double their number of tiles in each step; no other image's rows are added.
        """
        features, (down, across) = self.features(tiles), inputs["shares"].unbind(1)
        lines = down @ features.float().unflatten(1, (self._side, -1)).flatten(2)
        sums, reach = (across[:, None] @ lines.unflatten(2, (self._side, -1))).flatten(1, 2), 1
        while reach < len(sums):
            behind = sums.roll(-reach, 0).masked_fill((inputs["left"] <= reach)[:, None, None], 0)
            sums, reach = sums + behind, 2 * reach
        return nn.functional.pad(torch.cat([features, sums.to(features.dtype)], dim=-1), (0, 0, 1, 0))


ROWS = (
    TileFamily(
        "aria",
        "Aria",
        tower=stock("idefics3.Idefics3VisionTransformer", in_model("vision_tower.")),
        beside=projector(
            "aria.AriaProjector",
            served=(
                Served(
                    "projector_patch_to_query_dict",
                    _has_queries,
                    "a table with queries for (image_size / patch_size) squared, the patches of a tile",
                ),
            ),
        ),
        encoder=Aria,
        processor=images(_aria_settings),
        transformers="5.23.0",
    ),
    TileFamily(
        "moondream3",
        "Moondream 3",
        configuration=_moondream_config,
        tower=siglip_of_blocks(stripped("model.vision.")),
        beside={
            "projector": part(
                nn.Sequential,
                {"model.vision.proj_mlp.fc1.": "0.", "model.vision.proj_mlp.fc2.": "2."},
                arguments=lambda config: (
                    nn.Linear(2 * config.vision_config.hidden_size, config.vision_config.proj_inner_dim),
                    nn.GELU(approximate="tanh"),
                    nn.Linear(config.vision_config.proj_inner_dim, config.text_config.hidden_size),
                ),
            ),
            "start": part(
                nn.Linear,
                {"model.text.wte": "weight"},
                convert=lambda weights, _: {name: own[:1] for name, own in weights.items()},  # <|endoftext|>
                arguments=lambda config: (config.text_config.hidden_size, 1, False),
            ),
        },
        encoder=Moondream,
        processor=images(_moondream_settings),
        in_code=True,
    ),
)
