"""Pix2Struct, MatCha and DePlot (Google)."""

from collections.abc import Mapping
from dataclasses import replace
from math import isqrt
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitwire_server.core.grids import Grid
from vitwire_server.core.models import Geometry, Preprocessing, Resizing
from vitwire_server.towers.configs import Config, changed
from vitwire_server.towers.family import Accepts, of_transformers, stripped
from vitwire_server.towers.layouts.raster import RasterFamily, RasterTower, places
from vitwire_server.towers.metadata import Kind, Rows
from vitwire_server.towers.processors.settings import IDENTITY, bounded_above, images, whole
from vitwire_server.towers.shared.parts import stock


def _settings(image: Mapping[str, Any], config: Config) -> Preprocessing:
    """Clients send pixels, as the processor normalises each image by its own mean and deviation."""
    patch = config.vision_config.patch_size
    most = whole(image, "max_patches", 2048) * patch**2
    return bounded_above(image, most, patch, Resizing.OTHER, IDENTITY)


class Pix2StructTower(RasterTower):
    """Learned positions by row and by column, which are counted from 1."""

    def _geometry(self, config: Config) -> Geometry:
        return replace(super()._geometry(config), longest_side=self.model.config.seq_len - 1)

    @property
    def attention_heads(self) -> tuple[int, int]:
        config: Config = self.model.config
        return config.num_attention_heads, config.d_kv

    def _inputs(self) -> dict[str, Kind]:
        return {"positions": Rows((2,), torch.int64)}

    def _compute(self, grid: Grid) -> dict[str, Tensor]:
        return {**super()._compute(grid), "positions": places(grid) + 1}

    def _rows(self, pixels: Tensor, tensors: Mapping[str, Tensor], attended: Mapping[str, Any]) -> Tensor:
        embeddings, (rows, columns) = self.model.embeddings, tensors["positions"].unbind(1)
        states = embeddings.patch_projection(pixels)
        states = states + embeddings.row_embedder(rows) + embeddings.column_embedder(columns)
        states = states.unsqueeze(0)
        for layer in self.model.encoder.layer:
            states, _ = layer(states, None, **attended)
        return self.model.layernorm(states[0])  # type: ignore[no-any-return]


def _config(folder: Path, settings: Mapping[str, Any]) -> Config:
    """Checkpoints say how many columns a patch has, and not its side. Raises ValueError unless patches are square."""
    config = of_transformers(folder, settings)
    columns = config.vision_config.patch_embed_hidden_size
    side = isqrt(columns // 3)
    if 3 * side**2 != columns:
        raise ValueError(f"vision_config.patch_embed_hidden_size is {columns}, but must be 3 times a square")
    return changed(config, {"vision_config.patch_size": side})


ROWS = (
    RasterFamily(
        model_type="pix2struct",
        title="Pix2Struct, MatCha, DePlot",
        configuration=_config,
        tower=stock("pix2struct.Pix2StructVisionModel", stripped("encoder.")),
        width="vision_config.hidden_size",
        forward=Pix2StructTower,
        channels_last=True,
        layers="encoder.layer",
        processor=images(_settings),
        images=Accepts.PIXELS,
    ),
)
