"""Pixtral and Mistral 3."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitwire_server.core.grids import Grid
from vitwire_server.core.items import Modality
from vitwire_server.core.models import Preprocessing, Resizing
from vitwire_server.towers.family import Family, Module, Parts, in_model, last_layer
from vitwire_server.towers.layouts.patches import neighbours
from vitwire_server.towers.layouts.raster import NavitFamily, NavitTower, places
from vitwire_server.towers.metadata import Rows, Sources
from vitwire_server.towers.processors.settings import (
    BICUBIC,
    CLIP,
    Normalisation,
    Processor,
    bounded,
    square,
)
from vitwire_server.towers.served import Served

_PROJECTOR = in_model("multi_modal_projector.")


_TOWER = in_model("vision_tower.")


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


def _pixtral_settings(files: Processor, config: Any) -> dict[Modality, Preprocessing]:  # noqa: ANN401
    longest = square(files.image)
    factor = config.vision_config.patch_size * getattr(config, "spatial_merge_size", 1)
    if longest < factor:
        raise ValueError(f"size {longest} is less than one token of {factor} pixels")
    return {Modality.IMAGE: _settings(files.image, longest**2, factor, Resizing.LONGEST_SIDE, CLIP)}


@dataclass(frozen=True, kw_only=True)
class PixtralFamily(NavitFamily):
    """Checkpoints of which only those with Pixtral's tower are served."""

    def read_config(self, folder: Path, settings: Mapping[str, Any]) -> Any:  # noqa: ANN401
        """See Family. Raises ValueError over another tower."""
        config = super().read_config(folder, settings)
        if config.vision_config.model_type != "pixtral":
            raise ValueError(f"its tower is {config.vision_config.model_type}, only Pixtral's is served")
        last_layer(config)
        return config


class PixtralTower(NavitTower):
    """Rotary positions by row and column; in Mistral 3, a learned merger of neighbours before the projector."""

    def __init__(self, family: NavitFamily, parts: Parts, config: Any) -> None:  # noqa: ANN401
        super().__init__(family, parts, config)
        self._kinds["positions"] = Rows((2,), torch.int64)
        if self.geometry.merge > 1:
            self._kinds["neighbours"] = Sources(self.geometry.merge**2)

    def _compute(self, grid: Grid) -> dict[str, Tensor]:
        computed = {**super()._compute(grid), "positions": places(grid)}
        if self.geometry.merge > 1:
            computed["neighbours"] = neighbours(grid, self.geometry.merge)
        return computed

    def _rows(self, pixels: Tensor, tensors: Mapping[str, Tensor], attended: Mapping[str, Any]) -> Tensor:
        model, side = self.model, self.geometry.patch
        patches = model.patch_conv(pixels.view(len(pixels), -1, side, side)).flatten(1)
        states = model.ln_pre(patches.unsqueeze(0))
        turns = model.patch_positional_embedding(states, tensors["positions"])
        states = model.transformer(states, attention_mask=None, position_embeddings=turns, **attended).last_hidden_state
        if self.geometry.merge == 1:
            return self._projector(states[0])  # type: ignore[no-any-return]
        return self._merged(states[0], tensors["neighbours"])

    def _merged(self, states: Tensor, neighbours: Tensor) -> Tensor:
        """Of a token's columns, those of all its patches lie side by side."""
        projector = self._projector
        beside = projector.norm(states)[neighbours].transpose(1, 2).flatten(1)
        hidden = projector.act(projector.linear_1(projector.patch_merger.merging_layer(beside)))
        return projector.linear_2(hidden)  # type: ignore[no-any-return]


_PIXTRAL = PixtralFamily(
    model_type="llava",
    title="Pixtral",
    architecture="24 x 1024, patch 16",
    tower=Module(source="pixtral.modeling_pixtral:PixtralVisionModel", prefixes=_TOWER),
    beside={
        "projector": Module(
            source="llava.modeling_llava:LlavaMultiModalProjector",
            prefixes=_PROJECTOR,
            config="",
            served=(Served("vision_feature_select_strategy", lambda strategy, _: strategy == "full", "'full'"),),
        )
    },
    width="text_config.hidden_size",
    adapter=PixtralTower,
    layers="transformer.layers",
    processor=_pixtral_settings,
    videos=False,
    special="LLaVA's layout with Pixtral's tower",
)


_MISTRAL3 = PixtralFamily(
    model_type="mistral3",
    title="Mistral Small 3.1",
    architecture="24 x 1024, patch 14",
    tower=_PIXTRAL.tower,
    beside={
        "projector": Module(
            source="mistral3.modeling_mistral3:Mistral3MultiModalProjector", prefixes=_PROJECTOR, config=""
        )
    },
    width="text_config.hidden_size",
    adapter=PixtralTower,
    merge="spatial_merge_size",
    layers="transformer.layers",
    processor=_pixtral_settings,
    videos=False,
)


ROWS: tuple[Family, ...] = (_PIXTRAL, _MISTRAL3)
