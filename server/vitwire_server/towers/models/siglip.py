"""SigLIP and SigLIP 2 (Google)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isqrt
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitwire_server.core.grids import Grid
from vitwire_server.core.items import Modality
from vitwire_server.core.models import Preprocessing, Resizing
from vitwire_server.core.pooling import Pooling
from vitwire_server.towers.configs import Config, changed
from vitwire_server.towers.family import Accepts, Family, Module, Parts, Pooler, stripped
from vitwire_server.towers.layouts.plain import PlainEncoder, PlainFamily, no_leading_tokens
from vitwire_server.towers.layouts.raster import RasterFamily, RasterTower
from vitwire_server.towers.metadata import Kind, Rows
from vitwire_server.towers.processors.settings import BILINEAR, HALF, ProcessorFiles, bounded_above, whole
from vitwire_server.towers.shared.pooling import MEAN, SegmentAttention, SegmentMean, attention
from vitwire_server.towers.shared.siglip import packed_layers

_SIGLIP2_PATCHES = 256
_SIGLIP_TOWER = "siglip.modeling_siglip:SiglipVisionModel"
_NOT_TOWER = ("head.", "embeddings.position_ids")


def _head(stem: str, prefixes: Mapping[str, str], config: str = "vision_config") -> Module:
    """The pooling head of a tower whose weights have these prefixes."""
    return Module(
        source=f"{stem}MultiheadAttentionPoolingHead",
        prefixes={f"{prefix}head.": "" for prefix in prefixes},
        config=config,
    )


def _siglip2_settings(files: ProcessorFiles, config: Config) -> dict[Modality, Preprocessing]:
    patch = config.vision_config.patch_size
    most = whole(files.image, "max_num_patches", _SIGLIP2_PATCHES)
    return {Modality.IMAGE: bounded_above(files.image, most * patch**2, patch, Resizing.MOST_PATCHES, HALF, BILINEAR)}


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
        states = packed_layers(model.encoder.layers, states, model.config._attn_implementation, attended)  # noqa: SLF001 - set by use_attention
        rows: Tensor = model.post_layernorm(states[0])
        return rows


@dataclass(frozen=True, kw_only=True)
class Siglip2Family(RasterFamily):
    """SigLIP 2, whose pooling head is not a part of the tower."""

    def read_config(self, folder: Path, settings: Mapping[str, Any]) -> Config:
        """See Family. Raises ValueError over a table of positions that is not square."""
        config = super().read_config(folder, settings)
        vision = config.vision_config
        if isqrt(vision.num_patches) ** 2 != vision.num_patches:
            raise ValueError(f"{vision.num_patches} positions are not a square")
        used = bool(getattr(vision, "vision_use_head", True))
        return changed(config, {"vision_config.vision_use_head": False, "has_head": used})


_SIGLIP2 = Siglip2Family(
    model_type="siglip2",
    title="SigLIP 2 NaFlex",
    architecture="12 x 768 or 27 x 1152, patch 16",
    tower=Module(
        source="siglip2.modeling_siglip2:Siglip2VisionModel",
        prefixes=stripped("vision_model."),
        ignored=("head.",),
    ),
    width="vision_config.hidden_size",
    forward=Siglip2Tower,
    converts=False,
    channels_last=True,
    layers="encoder.layers",
    processor=_siglip2_settings,
    videos=Accepts.NOTHING,
    poolers=(
        replace(attention(_head("siglip2.modeling_siglip2:Siglip2", stripped("vision_model."))), make=SegmentAttention),
        Pooler(pooling=Pooling.MEAN, make=SegmentMean),
    ),
    special="rows of the patches, after the last norm",
)

_SIGLIP = PlainFamily(
    model_type="siglip",
    title="SigLIP, SigLIP 2 of fixed resolution",
    architecture="12 x 768, 24 x 1024, 27 x 1152 or 40 x 1536, patch 14, 16 or 32",
    tower=Module(source=_SIGLIP_TOWER, prefixes=stripped("vision_model."), ignored=_NOT_TOWER),
    encoder=PlainEncoder,
    leading=no_leading_tokens,
    head="vision_use_head",
    poolers=(attention(_head("siglip.modeling_siglip:Siglip", stripped("vision_model."))), MEAN),
    processor="Siglip",
    special="rows of the patches, after the last norm",
)

_SIGLIP_VISION = replace(
    _SIGLIP,
    model_type="siglip_vision_model",
    title="SigLIP (vision alone)",
    tower=Module(source=_SIGLIP_TOWER, prefixes=stripped("vision_model.", ""), ignored=_NOT_TOWER, config=""),
    poolers=(attention(_head("siglip.modeling_siglip:Siglip", stripped("vision_model.", ""), config="")), MEAN),
)

ROWS: tuple[Family, ...] = (_SIGLIP2, _SIGLIP, _SIGLIP_VISION)
