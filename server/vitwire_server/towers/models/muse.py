"""Muse (Meta): windows of patches in most layers, learned and rotary positions, pixel shuffle."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import vision_utils

from vitwire_server.core.budgets import Budget
from vitwire_server.core.grids import Grid
from vitwire_server.core.items import Modality
from vitwire_server.core.models import Geometry, Preprocessing
from vitwire_server.towers.configs import Config
from vitwire_server.towers.family import Accepts, Parts, in_model
from vitwire_server.towers.layouts.patches import most_windows, neighbours
from vitwire_server.towers.layouts.raster import RasterFamily, RasterTower, places
from vitwire_server.towers.metadata import Boundaries, Capacity, Kind, Order, Rows, Sources
from vitwire_server.towers.processors.settings import HALF, ProcessorFiles, per_channel, read_settings, unsized
from vitwire_server.towers.shared.learned import TAPPED
from vitwire_server.towers.shared.parts import part, stock, variant


def _muse_settings(files: ProcessorFiles, config: Config) -> dict[Modality, Preprocessing]:
    frames = config.vision_config.patch_temporal

    def of(own: Mapping[str, Any]) -> Preprocessing:
        mean, std = (per_channel(own, key, HALF[0]) * frames for key in ("image_mean", "image_std"))
        return unsized({**own, "image_mean": None, "image_std": None}, (mean, std))

    return {Modality.IMAGE: of(files.image), Modality.VIDEO: of(files.video)}


class MuseTower(RasterTower):
    """Patches are brought into the order of windows for all layers; some of these see the whole frame."""

    def __init__(self, family: RasterFamily, parts: Parts, config: Config) -> None:
        super().__init__(family, parts, config)
        self._adapter, self._projection = parts["adapter"], parts["projector"]
        self._eps: float = config.text_config.rms_norm_eps
        self._side: int = self.model.window_size // self.model.patch_size
        self._full = [kind == "full_attention" for kind in self.model.config.layer_types]

    def _geometry(self, config: Config) -> Geometry:
        """Columns of a patch are `(T, C, p, p)`, so frames count as channels."""
        return replace(super()._geometry(config), channels=3 * config.vision_config.patch_temporal)

    def capacity(self, budget: Budget) -> Capacity:
        own = super().capacity(budget)
        return replace(own, windows=most_windows(own.patches, budget.max_segments, self._side))

    def exact(self, grids: Sequence[Grid]) -> Capacity:
        windows = sum(len(self._measure(grid)["cu_window_seqlens"]) for grid in grids)
        return replace(super().exact(grids), windows=windows)

    def _inputs(self) -> dict[str, Kind]:
        window = self._side**2
        return {
            "positions": Rows((2,), torch.int64),
            **TAPPED,
            "window_index": Order(per_patch=True),
            "cu_window_seqlens": Boundaries(slots=lambda c: c.windows, longest=lambda _: window),
            "neighbours": Sources(self.geometry.merge**2),
        }

    def _compute(self, grid: Grid) -> dict[str, Tensor]:
        """Neighbours are numbered in the order of windows.

        Learned positions are read as Meta's own code does: resampled to `(w, h)`, but taken line by line. Only images
        that are not square show it; transformers before 5.24 resamples Muse Glimmer's to `(h, w)`.
        """
        embedder = self.model.patch_embedder
        indices, weights = vision_utils.get_vision_interpolation_indices_and_weights(
            torch.tensor([(1, grid.w, grid.h)]),
            num_grid_per_side=embedder.num_grid_per_side,
            mode=embedder.interpolation_mode,
            align_corners=embedder.interpolation_align_corners,
            spatial_merge_size=1,
            padding=embedder.interpolation_padding,
        )
        order, ends = vision_utils.get_vision_window_index(
            torch.tensor([grid]), spatial_merge_size=1, window_size=self._side, patch_size=1
        )
        return {
            **super()._compute(grid),
            "positions": places(grid)[order].flip(-1) + 1,
            "interp_indices": indices.repeat(grid.t, 1),
            "interp_weights": weights.repeat(grid.t, 1),
            "window_index": order,
            "cu_window_seqlens": ends[1:].int(),
            "neighbours": torch.argsort(order)[neighbours(grid, self.geometry.merge)],
        }

    def _rows(self, pixels: Tensor, tensors: Mapping[str, Tensor], attended: Mapping[str, Any]) -> Tensor:
        model, embedder = self.model, self.model.patch_embedder
        learned = embedder.position_embedding_table(tensors["interp_indices"]) * tensors["interp_weights"][:, :, None]
        states = embedder.patch_embedding(pixels)
        states = model.ln_pre(states + learned.sum(1).to(states.dtype))[tensors["window_index"]]
        rotary = model.rotary_emb(states, tensors["positions"])
        windows, frames = (
            (tensors["cu_window_seqlens"], self._side**2),
            (tensors["cu_seqlens"], attended["max_length_q"]),
        )
        for layer, full in zip(model.layers, self._full, strict=True):
            boundaries, longest = frames if full else windows
            states = layer(states, position_embeddings=rotary, cu_seqlens=boundaries, max_seqlen=longest)
        beside = model.ln_post(states)[tensors["neighbours"]].transpose(1, 2).flatten(1)
        rows: Tensor = self._projection(self._adapter(beside))
        return functional.rms_norm(rows.float(), rows.shape[-1:], eps=self._eps).to(rows.dtype)


@dataclass(frozen=True, kw_only=True)
class MuseFamily(RasterFamily):
    """Muse, whose patches have a mean and a deviation for each channel of each frame."""

    def preprocessing(self, folder: Path, config: Config) -> dict[Modality, Preprocessing]:
        channels = 3 * config.vision_config.patch_temporal
        return read_settings(folder, lambda files: self.processor(files, config), channels=channels)


_GLIMMER = MuseFamily(
    "muse_glimmer",
    "Muse Glimmer",
    tower=stock("muse_glimmer.MuseGlimmerVisionModel", in_model("vision_tower.")),
    beside={
        "adapter": part("muse_glimmer.MuseGlimmerVisionAdapter", in_model("vision_adapter.")),
        "projector": part(
            nn.Linear,
            in_model("vision_projection."),
            arguments=lambda config: (config.projector_hidden_size, config.text_config.hidden_size, False),
        ),
    },
    forward=MuseTower,
    merge="vision_config.merge_size",
    layers="layers",
    processor=_muse_settings,
    images=Accepts.PIXELS,
    videos=Accepts.PIXELS,
    transformers="5.23.0",
)

ROWS = (
    _GLIMMER,
    variant(_GLIMMER, "muse_spark", "Muse Spark", "muse_spark.MuseSparkVisionModel"),
)
