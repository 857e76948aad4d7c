"""Aria (Rhymes AI)."""

from collections.abc import Mapping
from dataclasses import asdict
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from vitwire_server.core.footprints import TileFootprints
from vitwire_server.core.geometries import MarginGeometry
from vitwire_server.core.grids import Grid
from vitwire_server.core.models import Preprocessing
from vitwire_server.core.tilings import Tiling, TilingRule
from vitwire_server.towers.configs import Config, Served, require
from vitwire_server.towers.family import Parts, in_model
from vitwire_server.towers.layouts.assembled import AssembledEncoder, UnitInput
from vitwire_server.towers.layouts.tiles import TileFamily, Unit
from vitwire_server.towers.processors.settings import HALF, images, whole
from vitwire_server.towers.processors.tiles import tiled
from vitwire_server.towers.shared.parts import projector, stock
from vitwire_server.towers.shared.projected_tiles import ProjectedTiles
from vitwire_server.towers.shared.siglip import masked_states


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
)
