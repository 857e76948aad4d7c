"""Image encoders that were trained with texts, and Pix2Struct, MatCha and DePlot (Google), which have patches alike.

CLIP (OpenAI), MetaCLIP 2 (Meta), Chinese CLIP (OFA), AltCLIP (BAAI), MLCD (DeepGlint), AIMv2 (Apple), SigLIP (Google).
"""

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
from vitwire_server.towers.configs import Config, changed
from vitwire_server.towers.family import Accepts, Module, Parts, Pooler, of_transformers, stripped
from vitwire_server.towers.layouts.plain import PlainEncoder, PlainFamily
from vitwire_server.towers.layouts.raster import RasterFamily, RasterTower, places
from vitwire_server.towers.metadata import Kind, Rows
from vitwire_server.towers.processors.settings import BILINEAR, HALF, IDENTITY, bounded_above, images, whole
from vitwire_server.towers.shared.parts import part, stock, variant
from vitwire_server.towers.shared.pooling import MEAN, SegmentAttention, SegmentMean, attention, class_token
from vitwire_server.towers.shared.siglip import packed_layers

_NORM = "post_layernorm"
"""Applied to the class token alone: rows of patches come before it, as transformers returns them."""
_AIMV2, _AIMV2_HEAD = "aimv2.Aimv2VisionModel", "aimv2.Aimv2AttentionPoolingHead"
_SIGLIP, _SIGLIP_HEAD = "siglip.SiglipVisionModel", "siglip.SiglipMultiheadAttentionPoolingHead"
_SIGLIP2_PATCHES = 256


def _tower(source: str, *ignored: str, alone: bool = False, **fields: Any) -> Module:  # noqa: ANN401 - of Module
    """Of a checkpoint with a text model, or of the vision model alone; older releases stored position ids."""
    prefixes = stripped("vision_model.", "") if alone else stripped("vision_model.")
    make = part if alone else stock
    return make(source, prefixes, ignored=("embeddings.position_ids", *ignored), **fields)


def _attention(source: str, *, alone: bool = False, projected: bool = False) -> Pooler:
    """The pooling head of such a tower."""
    prefixes = stripped("vision_model.head.", "head.") if alone else stripped("vision_model.head.")
    return attention((part if alone else stock)(source, prefixes), projected=projected)


def _projects(config: Config) -> bool:
    """True if a checkpoint of the vision part alone has the projection."""
    return "WithProjection" in str(config.architectures)  # whatever the file holds: config classes do not check it


def siglip2_config(folder: Path, settings: Mapping[str, Any]) -> Config:
    """Without the pooling head, which is not a part of the tower. Raises ValueError unless positions are a square."""
    config = of_transformers(folder, settings)
    vision = config.vision_config
    if isqrt(vision.num_patches) ** 2 != vision.num_patches:
        raise ValueError(f"{vision.num_patches} positions are not a square")
    used = bool(getattr(vision, "vision_use_head", True))
    return changed(config, {"vision_config.vision_use_head": False, "has_head": used})


def _siglip2_settings(image: Mapping[str, Any], config: Config) -> Preprocessing:
    patch = config.vision_config.patch_size
    most = whole(image, "max_num_patches", _SIGLIP2_PATCHES)
    return bounded_above(image, most * patch**2, patch, Resizing.MOST_PATCHES, HALF, BILINEAR)


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


def _pix2struct_settings(image: Mapping[str, Any], config: Config) -> Preprocessing:
    """Clients send pixels, as the processor normalises each image by the mean and deviation of its pixels."""
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


def _pix2struct_config(folder: Path, settings: Mapping[str, Any]) -> Config:
    """Checkpoints say how many columns a patch has, and not its side. Raises ValueError unless patches are square."""
    config = of_transformers(folder, settings)
    columns = config.vision_config.patch_embed_hidden_size
    side = isqrt(columns // 3)
    if 3 * side**2 != columns:
        raise ValueError(f"vision_config.patch_embed_hidden_size is {columns}, but must be 3 times a square")
    return changed(config, {"vision_config.patch_size": side})


_CLIP = PlainFamily(
    "clip",
    "CLIP",
    tower=_tower("clip.CLIPVisionModel"),
    encoder=PlainEncoder,
    poolers=(class_token(norm=_NORM, projected=True), MEAN),
    processor="CLIP",
)

_MLCD = variant(
    _CLIP,
    "mlcd_vision_model",
    "MLCD",
    tower=_tower("mlcd.MLCDVisionModel", alone=True),
    poolers=(class_token(norm=_NORM), MEAN),
)

_AIMV2_ALONE = variant(
    _CLIP,
    "aimv2_vision_model",
    "AIMv2 (vision alone)",
    tower=_tower(_AIMV2, "head.", alone=True),
    leading=0,
    head="use_head",
    poolers=(_attention(_AIMV2_HEAD, alone=True), MEAN),
)

_SIGLIP_ALONE = variant(
    _AIMV2_ALONE,
    "siglip_vision_model",
    "SigLIP (vision alone)",
    tower=_tower(_SIGLIP, "head.", alone=True),
    head="vision_use_head",
    poolers=(_attention(_SIGLIP_HEAD, alone=True), MEAN),
    processor="Siglip",
)

ROWS = (
    _CLIP,
    variant(
        _CLIP,
        "clip_vision_model",
        "CLIP (vision alone)",
        tower=_tower("clip.CLIPVisionModel", "visual_projection.", alone=True),
        poolers=(class_token(norm=_NORM, projected=True, offered=_projects), *_MLCD.poolers),
    ),
    variant(_CLIP, "metaclip_2", "MetaCLIP 2", "metaclip_2.MetaClip2VisionModel"),
    variant(_CLIP, "chinese_clip", "Chinese CLIP", "chinese_clip.ChineseCLIPVisionModel", processor="ChineseCLIP"),
    variant(
        _CLIP,
        "altclip",
        "AltCLIP",  # transformers 5 writes the older names
        tower=_tower("altclip.AltCLIPVisionModel", renames=((r"^encoder\.layer\.", "encoder.layers."),)),
    ),
    _MLCD,
    variant(_MLCD, "mlcd", "MLCD"),
    _AIMV2_ALONE,
    variant(
        _AIMV2_ALONE,
        "aimv2",
        "AIMv2",
        tower=_tower(_AIMV2, "head."),
        poolers=(_attention(_AIMV2_HEAD, projected=True), MEAN),
    ),
    RasterFamily(
        "siglip2",
        "SigLIP 2 NaFlex",
        configuration=siglip2_config,
        tower=stock("siglip2.Siglip2VisionModel", stripped("vision_model."), ignored=("head.",)),
        width="vision_config.hidden_size",
        forward=Siglip2Tower,
        converts=False,
        channels_last=True,
        processor=images(_siglip2_settings),
        poolers=(
            replace(_attention("siglip2.Siglip2MultiheadAttentionPoolingHead"), make=SegmentAttention),
            Pooler(pooling=Pooling.MEAN, make=SegmentMean),
        ),
    ),
    variant(
        _SIGLIP_ALONE,
        "siglip",
        "SigLIP, SigLIP 2 of fixed resolution",
        tower=_tower(_SIGLIP, "head."),
        poolers=(_attention(_SIGLIP_HEAD), MEAN),
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
