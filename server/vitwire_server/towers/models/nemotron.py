"""Nemotron Omni (NVIDIA): C-RADIO's tower for images of any size, whose sequences begin with learned rows."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import vision_utils

from vitwire_server.core.grids import Grid
from vitwire_server.core.items import Modality
from vitwire_server.core.models import Geometry, Preprocessing, Resizing
from vitwire_server.towers.configs import Config, changed
from vitwire_server.towers.family import Accepts, Family, Module, Parts, stripped
from vitwire_server.towers.layouts.patches import TAPS, neighbours
from vitwire_server.towers.layouts.raster import RasterFamily, RasterTower
from vitwire_server.towers.metadata import Kind, Rows, Sources
from vitwire_server.towers.models.internvl import unfused
from vitwire_server.towers.models.radio import RADIO_NAMES
from vitwire_server.towers.processors.settings import CLIP, ProcessorFiles, bounded
from vitwire_server.towers.served import Served
from vitwire_server.towers.shared.pixel_shuffle import MLP1, SHUFFLED, shuffles


class RadioTower(RasterTower):
    """Positions cropped out of a resampled square; each frame's sequence is its learned rows, then its patches."""

    def __init__(self, family: RasterFamily, parts: Parts, config: Config) -> None:
        super().__init__(family, parts, config)
        normed = config.text_config.num_nextn_predict_layers > 0
        # The layer norm that follows the tower of models which predict ahead has no weights of its own.
        self._eps: float | None = config.vision_config.layer_norm_eps if normed else None

    def _geometry(self, config: Config) -> Geometry:
        return super()._geometry(changed(config, {_MERGE: round(1 / config.downsample_ratio)}))

    def _inputs(self) -> dict[str, Kind]:
        return {
            "interp_indices": Rows((TAPS["bilinear"],), torch.int64),
            "interp_weights": Rows((TAPS["bilinear"],), torch.float32),
            "neighbours": Sources(self.geometry.merge**2),
        }

    def _compute(self, grid: Grid) -> dict[str, Tensor]:
        side = max(grid.h, grid.w)
        taps = vision_utils.get_vision_interpolation_indices_and_weights(
            torch.tensor([(1, side, side)]),
            num_grid_per_side=self.model.embeddings.max_rows,
            mode="bilinear",
            align_corners=False,
            spatial_merge_size=1,
        )
        indices, weights = (
            own.view(side, side, -1)[: grid.h, : grid.w].flatten(0, 1).repeat(grid.t, 1) for own in taps
        )
        return {
            **super()._compute(grid),
            "interp_indices": indices,
            "interp_weights": weights,
            "neighbours": neighbours(grid, self.geometry.merge),
        }

    def _rows(self, pixels: Tensor, tensors: Mapping[str, Tensor], attended: Mapping[str, Any]) -> Tensor:
        embeddings = self.model.embeddings
        patches, first = embeddings.patch_projection(pixels), embeddings.cls_register_token
        taken = embeddings.position_embedding[0].float()[tensors["interp_indices"]]
        patches = patches + (taken * tensors["interp_weights"][:, :, None]).sum(1).to(patches.dtype)
        ends, places = _sequences(tensors["cu_seqlens"], len(patches), len(first))
        frames = len(ends) - 1
        states = patches.new_empty((len(patches) + frames * len(first), patches.shape[1]))
        starts = ends[:-1, None] + torch.arange(len(first), device=ends.device)
        states = states.index_copy(0, starts.flatten(), first.repeat(frames, 1)).index_copy(0, places, patches)
        states = states.unsqueeze(0)
        for layer in self.model.encoder.layer:
            states = layer(states, cu_seqlens=ends.int(), max_seqlen=attended["max_length_q"] + len(first))
        features = states[0, places]
        if self._eps is not None:
            features = functional.layer_norm(features, features.shape[-1:], eps=self._eps)
        return self._projector(features[tensors["neighbours"]].flatten(1))  # type: ignore[no-any-return]


def _sequences(ends: Tensor, patches: int, first: int) -> tuple[Tensor, Tensor]:
    """Ends of the frames' sequences, which begin with `first` rows each, and the places of the patches in them."""
    frames = torch.arange(len(ends), device=ends.device)
    numbers = torch.arange(patches, dtype=ends.dtype, device=ends.device)
    own = torch.searchsorted(ends[1:], numbers, right=True)
    return ends.long() + first * frames, numbers + first * (own + 1)


_MERGE = "vision_config.merged_by"
"""Field of the changed configuration: root of a token's patches."""


def _settings(files: ProcessorFiles, config: Config) -> dict[Modality, Preprocessing]:
    del config
    image = files.image
    named = {"image_mean": image.get("norm_mean"), "image_std": image.get("norm_std"), **image}
    return {Modality.IMAGE: replace(bounded(named, (1, 1), CLIP), resizing=Resizing.OTHER)}


_NEMOTRON = RasterFamily(
    model_type="nemotron_h_omni",
    title="Nemotron 3 Omni",
    architecture="32 x 1280, patch 16",
    tower=Module(
        source="vitwire_server.towers.models.nemotron_parts:Radio",
        prefixes=stripped("vision_model.radio_model.", "vision_model."),
        renames=RADIO_NAMES,
        ignored=("input_conditioner.",),
        convert=unfused,
    ),
    beside={
        "projector": Module(
            source="vitwire_server.towers.models.nemotron_parts:Projector",
            prefixes={"multi_modal_projector.": "", **MLP1},
            config="",
            served=(Served("downsample_ratio", shuffles, SHUFFLED),),
        )
    },
    width="text_config.hidden_size",
    forward=RadioTower,
    merge=_MERGE,
    layers="encoder.layer",
    processor=_settings,
    images=Accepts.PIXELS,
    videos=Accepts.NOTHING,
    special="C-RADIO; clips, which have weights of their own, and audio stay with the LLM",
    transformers="5.23.0",
)

ROWS: tuple[Family, ...] = (_NEMOTRON,)
