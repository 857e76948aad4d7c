"""MiniCPM-V, MiniCPM-o and MiniCPM-OCR (OpenBMB): of transformers' classes, and in the layout of their authors."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import vision_utils

from vitwire_server.core.grids import Grid
from vitwire_server.core.items import Modality
from vitwire_server.core.models import Geometry
from vitwire_server.towers.configs import Config, Served, changed, dtype_of, one_of, require, usual_fields
from vitwire_server.towers.family import Accepts, Parts, in_model, stripped
from vitwire_server.towers.layouts.patches import neighbours
from vitwire_server.towers.layouts.raster import RasterFamily, RasterTower
from vitwire_server.towers.metadata import Boundaries, Kind, Order, Rows, Sources
from vitwire_server.towers.processors.settings import HALF, images, unsized
from vitwire_server.towers.shared.learned import positioned
from vitwire_server.towers.shared.parts import part, projector, stock, variant
from vitwire_server.towers.shared.resamplers import ResampledTower, Resampler
from vitwire_server.towers.shared.siglip import packed_layers, siglip, siglip_config

_SIDE = 2
"""Side of the windows that become one patch, and of the squares that become one token."""
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
        model, inner = self.model, self.model.config.insert_layer_id
        states = positioned(model.embeddings, pixels, tensors["positions"], self.geometry.patch)
        boundaries, longest = tensors["cu_seqlens"], attended["max_length_q"]
        for number, layer in enumerate(model.encoder.layers):
            states = layer(states, None, cu_seqlens=boundaries, max_seqlen=longest)
            if self._merges and number == inner:  # the stock merger reads no sizes of images if windows are given
                windows = {name: tensors[name] for name in ("window_index", "cu_window_seqlens")}
                states = model.vit_merger(states, tensors["positions"].new_empty((0, 2)), **windows)
                boundaries, longest = boundaries // _WINDOW, -(-longest // _WINDOW)
        merged = model.post_layernorm(states)[0]
        return self._projector.mlp[0](merged[tensors["neighbours"]].flatten(1))  # type: ignore[no-any-return]


def _nearest(count: int, side: int) -> Tensor:
    """For each of `count` patches along an axis, the learned position, of `side`, that its share of the axis falls on.

    The step is a float32, as the authors compute it: where a patch begins on a boundary, its rounding decides.
    """
    step = float(1 / torch.tensor(count, dtype=torch.int32))
    return torch.bucketize(torch.arange(0, 1 - 1e-6, step), torch.arange(1 / side, 1.0, 1 / side), right=True)


class OriginalMiniCpmTower(ResampledTower):
    """SigLIP on slices of any size, each patch with the learned position nearest to its own, and a resampler."""

    def __init__(self, family: RasterFamily, parts: Parts, config: Config) -> None:
        super().__init__(family, parts, config)
        self._side = self.model.config.image_size // self.geometry.patch

    def _inputs(self) -> dict[str, Kind]:
        return {"positions": Rows((), torch.int64), **super()._inputs()}

    def _compute(self, grid: Grid) -> dict[str, Tensor]:
        rows, columns = (_nearest(count, self._side) for count in (grid.h, grid.w))
        positions = (rows[:, None] * self._side + columns).flatten().repeat(grid.t)
        return {**super()._compute(grid), "positions": positions}

    def _rows(self, pixels: Tensor, tensors: Mapping[str, Tensor], attended: Mapping[str, Any]) -> Tensor:
        model = self.model
        states = positioned(model.embeddings, pixels, tensors["positions"], self.geometry.patch)
        states = packed_layers(model.encoder.layers, states, model.config._attn_implementation, attended)  # noqa: SLF001 - set by use_attention
        return self._resampled(model.post_layernorm(states[0]), tensors, attended)


def _original_config(_: Path, settings: Mapping[str, Any], *, versions: Sequence[float]) -> Config:
    """From a config.json with the language model's fields at its top; towers of other versions take other positions."""
    version = settings.get("version")
    require("version", None if version is None else float(version), *versions)
    vision = settings["vision_config"]
    dropped = int(bool(settings.get("drop_vision_last_layer")))
    config = siglip_config(
        {
            **usual_fields(vision, "hidden_act", "layer_norm_eps", "num_channels"),
            "num_hidden_layers": vision["num_hidden_layers"] - dropped,
        },
        width=settings["hidden_size"],
        dtype=dtype_of(settings),
    )
    return changed(config, {"query_num": settings["query_num"]})


_WINDOWS = (
    Served("window_kernel_size", _of_two, _SQUARES),
    Served(
        "insert_layer_id",
        lambda at, vision: 0 <= at < vision.num_hidden_layers,
        "the number of a layer, counted from 0",
    ),
)
_MERGER = (
    one_of("downsample_mode", "4x", _MERGED),
    Served("merge_kernel_size", _of_two, _SQUARES),
    one_of("merger_times", 1),
)


def _row(model_type: str, title: str, name: str) -> RasterFamily:
    return RasterFamily(
        model_type=model_type,
        title=title,
        tower=stock(f"{model_type}.{name}VisionModel", in_model("vision_tower."), served=_WINDOWS),
        beside=projector(f"{model_type}.{name}Merger", in_model("merger."), served=_MERGER),
        forward=MiniCpmTower,
        processor=lambda files, _: {
            Modality.IMAGE: unsized(files.image, HALF),
            Modality.VIDEO: unsized(files.video, HALF),
        },
        images=Accepts.PIXELS,
        videos=Accepts.PIXELS,
        transformers="5.23.0",
    )


_MINICPMV = RasterFamily(
    "minicpmv",
    "MiniCPM-V 2.6, 4.0 and 4.5",
    configuration=partial(_original_config, versions=(2.6, 4.0, 4.5)),
    tower=siglip("vpm."),
    beside={
        "resampler": part(
            Resampler,
            stripped("resampler."),
            served=(Served("query_num", lambda count, _: 0 < count < 4096, "from 1 to 4095"),),
        )
    },
    forward=OriginalMiniCpmTower,
    # The authors' processor cuts slices; their mean and deviation have names of their own.
    processor=images(
        lambda image, _: unsized({"image_mean": image.get("norm_mean"), "image_std": image.get("norm_std")}, HALF)
    ),
    images=Accepts.PIXELS,
)

ROWS = (
    _row("minicpmv4_6", "MiniCPM-V 4.6", "MiniCPMV4_6"),
    _row("minicpmv4_7", "MiniCPM-V 4.7", "MiniCPMV4_7"),
    _row("minicpm_ocr", "MiniCPM-OCR", "MiniCPMOcr"),
    _MINICPMV,
    variant(
        _MINICPMV,
        "minicpmo",
        "MiniCPM-o 2.6 and 4.5",
        configuration=partial(_original_config, versions=(2.6, 4.5)),
    ),
)
