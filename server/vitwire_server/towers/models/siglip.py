"""SigLIP, SigLIP 2, Pix2Struct, MatCha and DePlot (Google)."""

from collections.abc import Mapping
from dataclasses import replace
from math import isqrt
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitwire_server.core.grids import Grid
from vitwire_server.core.models import Geometry, Preprocessing, Resizing
from vitwire_server.core.pooling import Pooling
from vitwire_server.towers.configs import Config, Served, changed
from vitwire_server.towers.family import Accepts, Module, Parts, Pooler, of_transformers, stripped
from vitwire_server.towers.layouts.plain import PlainEncoder, PlainFamily
from vitwire_server.towers.layouts.raster import RasterFamily, RasterTower, places
from vitwire_server.towers.metadata import Kind, Rows
from vitwire_server.towers.processors.settings import BILINEAR, HALF, IDENTITY, bounded, bounded_above, images, whole
from vitwire_server.towers.shared.parts import part, stock, variant
from vitwire_server.towers.shared.pooling import MEAN, attention, segment_attention, segment_means
from vitwire_server.towers.shared.siglip import packed_layers

_SIGLIP, _SIGLIP_HEAD = "siglip.SiglipVisionModel", "siglip.SiglipMultiheadAttentionPoolingHead"
_NOT_SIGLIP = ("head.", "embeddings.position_ids")


def siglip2_config(folder: Path, settings: Mapping[str, Any]) -> Config:
    """Without the pooling head, which is not a part of the tower."""
    config = of_transformers(folder, settings)
    used = bool(getattr(config.vision_config, "vision_use_head", True))
    return changed(config, {"vision_config.vision_use_head": False, "has_head": used})


def siglip2(prefixes: Mapping[str, str]) -> Module:
    """SigLIP 2's tower, without its pooling head."""
    square = Served("num_patches", lambda number, _: isqrt(number) ** 2 == number, "a square")
    return stock("siglip2.Siglip2VisionModel", prefixes, ignored=("head.",), served=(square,))


def most_patches(image: Mapping[str, Any], areas: tuple[int, int]) -> Preprocessing:
    """Settings of images that keep their own number of patches within these areas."""
    return replace(bounded(image, areas, HALF, BILINEAR), resizing=Resizing.MOST_PATCHES)


def _siglip2_settings(image: Mapping[str, Any], config: Config) -> Preprocessing:
    most = whole(image, "max_num_patches", 256) * config.vision_config.patch_size**2
    return most_patches(image, (most, most))


class Siglip2Tower(RasterTower):
    """Learned positions, resampled to each grid; rows of the patches after the last norm."""

    def __init__(self, family: RasterFamily, parts: Parts, config: Config) -> None:
        super().__init__(family, parts, config)
        self._table = self.model.embeddings.position_embedding.weight.detach().cpu()

    def _inputs(self) -> dict[str, Kind]:
        return {"positions": Rows((self._table.shape[1],), self._table.dtype)}

    def _compute(self, grid: Grid) -> dict[str, Tensor]:
        """Resampled on the host, in float32."""
        embeddings = self.model.embeddings
        side = embeddings.position_embedding_size
        resampled = embeddings.resize_positional_embeddings(
            self._table.view(side, side, -1), torch.tensor([[grid.h, grid.w]]), grid.frame_patches
        )
        return {**super()._compute(grid), "positions": resampled[0].repeat(grid.t, 1)}

    def _rows(self, pixels: Tensor, tensors: Mapping[str, Tensor], attended: Mapping[str, Any]) -> Tensor:
        model = self.model
        states = (model.embeddings.patch_embedding(pixels) + tensors["positions"]).unsqueeze(0)
        states = packed_layers(self.blocks, states, model.config._attn_implementation, attended)  # noqa: SLF001 - set by use_attention
        rows: Tensor = model.post_layernorm(states[0])
        return rows


def _pix2struct_settings(image: Mapping[str, Any], config: Config) -> Preprocessing:
    """Clients send pixels, as the processor normalises each image by the mean and deviation of its pixels."""
    patch = config.vision_config.patch_size
    most = whole(image, "max_patches", 2048) * patch**2
    return bounded_above(image, most, patch, Resizing.OTHER, IDENTITY)


class Pix2StructTower(RasterTower):
    """Learned positions by row and by column, which are counted from 1."""

    def _geometry(self, config: Config) -> Geometry:
        return replace(super()._geometry(config), longest_side=self.model.config.seq_len - 1)

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


def _pix2struct_config(folder: Path, settings: Mapping[str, Any]) -> Config:
    """Checkpoints say how many columns a patch has, and not its side. Raises ValueError unless patches are square."""
    config = of_transformers(folder, settings)
    columns = config.vision_config.patch_embed_hidden_size
    side = isqrt(columns // 3)
    if 3 * side**2 != columns:
        raise ValueError(f"vision_config.patch_embed_hidden_size is {columns}, but must be 3 times a square")
    return changed(config, {"vision_config.patch_size": side})


_SIGLIP_ALONE = PlainFamily(
    "siglip_vision_model",
    "SigLIP (vision alone)",
    tower=part(_SIGLIP, stripped("vision_model.", ""), ignored=_NOT_SIGLIP),
    encoder=PlainEncoder,
    leading=0,
    head="vision_use_head",
    poolers=(attention(part(_SIGLIP_HEAD, stripped("vision_model.head.", "head."))), MEAN),
    processor="Siglip",
)

ROWS = (
    RasterFamily(
        "siglip2",
        "SigLIP 2 NaFlex",
        configuration=siglip2_config,
        tower=siglip2(stripped("vision_model.")),
        width="vision_config.hidden_size",
        forward=Siglip2Tower,
        converts=False,
        channels_last=True,
        processor=images(_siglip2_settings),
        poolers=(
            replace(
                attention(stock("siglip2.Siglip2MultiheadAttentionPoolingHead", stripped("vision_model.head."))),
                make=segment_attention,
            ),
            Pooler(pooling=Pooling.MEAN, make=segment_means),
        ),
    ),
    variant(
        _SIGLIP_ALONE,
        "siglip",
        "SigLIP, SigLIP 2 of fixed resolution",
        tower=stock(_SIGLIP, stripped("vision_model."), ignored=_NOT_SIGLIP),
        poolers=(attention(stock(_SIGLIP_HEAD, stripped("vision_model.head."))), MEAN),
    ),
    _SIGLIP_ALONE,
    RasterFamily(
        "pix2struct",
        "Pix2Struct, MatCha, DePlot",
        configuration=_pix2struct_config,
        tower=stock("pix2struct.Pix2StructVisionModel", stripped("encoder.")),
        width="vision_config.hidden_size",
        forward=Pix2StructTower,
        channels_last=True,
        layers="encoder.layer",
        processor=images(_pix2struct_settings),
        images=Accepts.PIXELS,
    ),
)
