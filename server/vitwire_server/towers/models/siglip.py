"""SigLIP 2 NaFlex (Google)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isqrt
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from vitwire_server.core.grids import Grid
from vitwire_server.core.items import Modality
from vitwire_server.core.models import Preprocessing, Resizing
from vitwire_server.towers.family import Family, Module, Parts, stripped
from vitwire_server.towers.layouts.raster import NavitFamily, NavitTower
from vitwire_server.towers.metadata import Rows
from vitwire_server.towers.processors.settings import (
    BICUBIC,
    BILINEAR,
    HALF,
    Normalisation,
    Processor,
    bounded,
)

_IDENTITY = ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))


def _settings(
    config: Mapping[str, Any],
    most: int,
    factor: int,
    resizing: Resizing,
    normalisation: Normalisation,
    resample: int = BICUBIC,
) -> Preprocessing:
    """Settings of images of at most `most` pixels whose sides are multiples of `factor`."""
    if not config.get("do_normalize", normalisation is not _IDENTITY):
        config, normalisation = {**config, "image_mean": None, "image_std": None}, _IDENTITY
    return replace(bounded(config, (factor**2, most), normalisation, resample), resizing=resizing)


_SIGLIP2_PATCHES = 256


def _siglip2_settings(files: Processor, config: Any) -> dict[Modality, Preprocessing]:  # noqa: ANN401
    patch = config.vision_config.patch_size
    most = int(files.image.get("max_num_patches", _SIGLIP2_PATCHES))
    return {Modality.IMAGE: _settings(files.image, most * patch**2, patch, Resizing.MOST_PATCHES, HALF, BILINEAR)}


@dataclass(frozen=True, kw_only=True)
class Siglip2Family(NavitFamily):
    """SigLIP 2, whose pooling head is left out."""

    def read_config(self, folder: Path, settings: Mapping[str, Any]) -> Any:  # noqa: ANN401
        """See Family. Raises ValueError over a table of positions that is no square."""
        config = super().read_config(folder, settings)
        vision = config.vision_config
        if isqrt(vision.num_patches) ** 2 != vision.num_patches:
            raise ValueError(f"{vision.num_patches} positions are no square")
        vision.vision_use_head = False
        return config


class Siglip2Tower(NavitTower):
    """Learned positions, resampled to each grid; rows of the patches after the last norm."""

    def __init__(self, family: NavitFamily, parts: Parts, config: Any) -> None:  # noqa: ANN401
        super().__init__(family, parts, config)
        self._table = self.model.embeddings.position_embedding.weight.detach().cpu()
        self._kinds["positions"] = Rows((self._table.shape[1],), self._table.dtype)

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
        for layer in model.encoder.layers:
            states = states + self._attention(layer.self_attn, layer.layer_norm1(states), attended)
            states = states + layer.mlp(layer.layer_norm2(states))
        rows: Tensor = model.post_layernorm(states[0])
        return rows

    def _attention(self, module: Any, states: Tensor, attended: Mapping[str, Any]) -> Tensor:  # noqa: ANN401
        """The stock module keeps the boundaries from attention, so its projections are called one by one."""
        attend = ALL_ATTENTION_FUNCTIONS[self.model.config._attn_implementation]  # noqa: SLF001 - set by use_attention
        query, key, value = (
            projection(states).unflatten(-1, (module.num_heads, -1)).transpose(1, 2)
            for projection in (module.q_proj, module.k_proj, module.v_proj)
        )
        rows, _ = attend(
            module, query, key, value, None, scaling=module.scale, dropout=0.0, is_causal=False, **attended
        )
        return module.out_proj(rows.flatten(2))  # type: ignore[no-any-return]


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
    adapter=Siglip2Tower,
    converts=False,
    channels_last=True,
    layers="encoder.layers",
    processor=_siglip2_settings,
    videos=False,
    special="rows of the patches, without the pooling head",
)


ROWS: tuple[Family, ...] = (_SIGLIP2,)
