"""MiniCPM-V 4.6 and later (OpenBMB): a merger of windows between layers, and another one behind them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import vision_utils

from vitwire_server.core.grids import Grid
from vitwire_server.core.items import Modality
from vitwire_server.core.models import Geometry, Preprocessing, Resizing
from vitwire_server.towers.configs import Config
from vitwire_server.towers.family import Accepts, Family, Module, in_model
from vitwire_server.towers.layouts.patches import neighbours
from vitwire_server.towers.layouts.raster import RasterFamily, RasterTower
from vitwire_server.towers.metadata import Boundaries, Kind, Order, Rows, Sources
from vitwire_server.towers.processors.settings import HALF, ProcessorFiles, bounded
from vitwire_server.towers.served import Served

_SIDE = 2
"""Of the windows that become one patch, and of the squares that become one token."""
_WINDOW = _SIDE**2
_SQUARES = "2 by 2"
_MERGED = "16x"
"""The mode in which windows are merged; in the other one, they are not."""


def _of_two(sides: Sequence[int], _: Config) -> bool:
    return list(sides) == [_SIDE, _SIDE]


class MiniCpmTower(RasterTower):
    """Learned positions of the nearest place in a table; layers after the merger attend between merged patches."""

    def _geometry(self, config: Config) -> Geometry:
        self._merges = config.downsample_mode == _MERGED
        return replace(super()._geometry(config), merge=_SIDE * (_SIDE if self._merges else 1))

    def _inputs(self) -> dict[str, Kind]:
        kinds: dict[str, Kind] = {"positions": Rows((), torch.int64)}
        if not self._merges:
            return {**kinds, "neighbours": Sources(_WINDOW)}
        return {
            **kinds,
            "window_index": Order(per_patch=True),
            "cu_window_seqlens": Boundaries(slots=lambda c: c.patches // _WINDOW, longest=lambda _: _WINDOW),
            "neighbours": Sources(_WINDOW, patches=_WINDOW),
        }

    def _compute(self, grid: Grid) -> dict[str, Tensor]:
        """Neighbours are numbered among merged patches, which lie line by line."""
        side, sizes = self.model.embeddings.num_patches_per_side, torch.tensor([[grid.h, grid.w]])
        order, ends = vision_utils.get_vision_window_index(
            torch.tensor([grid]), spatial_merge_size=1, window_size=_SIDE, patch_size=1
        )
        shrunk = _SIDE if self._merges else 1
        return {
            **super()._compute(grid),
            "positions": vision_utils.get_vision_nearest_position_ids(sizes, side).repeat(grid.t),
            "window_index": order,
            "cu_window_seqlens": ends[1:].int(),
            "neighbours": neighbours(Grid(grid.t, grid.h // shrunk, grid.w // shrunk), _SIDE),
        }

    def _rows(self, pixels: Tensor, tensors: Mapping[str, Tensor], attended: Mapping[str, Any]) -> Tensor:
        model, side = self.model, self.geometry.patch
        embeddings, inner = model.embeddings, model.config.insert_layer_id
        patches = embeddings.patch_embedding(pixels.view(len(pixels), -1, side, side)).flatten(1)
        states = (patches + embeddings.position_embedding(tensors["positions"])).unsqueeze(0)
        boundaries, longest = tensors["cu_seqlens"], attended["max_length_q"]
        for number, layer in enumerate(model.encoder.layers):
            states = layer(states, None, cu_seqlens=boundaries, max_seqlen=longest)
            if self._merges and number == inner:
                states = self._merged(states, tensors)
                boundaries, longest = boundaries // _WINDOW, -(-longest // _WINDOW)
        merged = model.post_layernorm(states)[0]
        return self._projector.mlp[0](merged[tensors["neighbours"]].flatten(1))  # type: ignore[no-any-return]

    def _merged(self, states: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        """The stock merger; it reads sizes of images only where windows are not given."""
        windows = {name: tensors[name] for name in ("window_index", "cu_window_seqlens")}
        no_sizes = tensors["positions"].new_empty((0, 2))
        merged: Tensor = self.model.vit_merger(states, no_sizes, **windows)
        return merged


def _settings(files: ProcessorFiles, config: Config) -> dict[Modality, Preprocessing]:
    del config
    given = {Modality.IMAGE: files.image, Modality.VIDEO: files.video}
    return {modality: replace(bounded(own, (1, 1), HALF), resizing=Resizing.OTHER) for modality, own in given.items()}


def _row(model_type: str, title: str, package: str, name: str) -> RasterFamily:
    return RasterFamily(
        model_type=model_type,
        title=title,
        architecture="27 x 1152, patch 14",
        tower=Module(
            source=f"{package}:{name}VisionModel",
            prefixes=in_model("vision_tower."),
            served=(
                Served("window_kernel_size", _of_two, _SQUARES),
                Served(
                    "insert_layer_id",
                    lambda at, vision: 0 <= at < vision.num_hidden_layers,
                    "the number of a layer, counted from 0",
                ),
            ),
        ),
        beside={
            "projector": Module(
                source=f"{package}:{name}Merger",
                prefixes=in_model("merger."),
                config="",
                served=(
                    Served("downsample_mode", lambda mode, _: mode in ("4x", _MERGED), "'4x' or '16x'"),
                    Served("merge_kernel_size", _of_two, _SQUARES),
                    Served("merger_times", lambda times, _: times == 1, "1"),
                ),
            )
        },
        width="text_config.hidden_size",
        forward=MiniCpmTower,
        layers="encoder.layers",
        processor=_settings,
        images=Accepts.PIXELS,
        videos=Accepts.PIXELS,
        special="each slice of an image is an item, as is its overview; windows are merged between layers",
        transformers="5.23.0",
    )


ROWS: tuple[Family, ...] = (
    _row("minicpmv4_6", "MiniCPM-V 4.6", "minicpmv4_6.modeling_minicpmv4_6", "MiniCPMV4_6"),
    _row("minicpmv4_7", "MiniCPM-V 4.7", "minicpmv4_7.modeling_minicpmv4_7", "MiniCPMV4_7"),
    _row("minicpm_ocr", "MiniCPM-OCR", "minicpm_ocr.modeling_minicpm_ocr", "MiniCPMOcr"),
)
