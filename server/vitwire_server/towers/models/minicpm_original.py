"""MiniCPM-V and MiniCPM-o (OpenBMB) in the layout that their authors publish."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitwire_server.core.grids import Grid
from vitwire_server.core.items import Modality
from vitwire_server.core.models import Preprocessing, Resizing
from vitwire_server.towers.configs import Config, changed, dtype_of
from vitwire_server.towers.family import Accepts, Family, Module, Parts, stripped
from vitwire_server.towers.layouts.raster import RasterFamily
from vitwire_server.towers.metadata import Kind, Rows
from vitwire_server.towers.processors.settings import HALF, ProcessorFiles, bounded
from vitwire_server.towers.served import Served
from vitwire_server.towers.shared.resampled import ResampledTower
from vitwire_server.towers.shared.siglip import packed_layers, siglip, siglip_config

_VISION = (
    "hidden_act",
    "hidden_size",
    "image_size",
    "intermediate_size",
    "layer_norm_eps",
    "num_attention_heads",
    "num_channels",
    "num_hidden_layers",
    "patch_size",
)


def _settings(files: ProcessorFiles, config: Config) -> dict[Modality, Preprocessing]:
    """Pixels of slices, which the authors' processor cuts; their mean and deviation have names of their own."""
    del config
    names = {"image_mean": files.image.get("norm_mean"), "image_std": files.image.get("norm_std")}
    return {Modality.IMAGE: replace(bounded(names, (1, 1), HALF), resizing=Resizing.OTHER)}


def _nearest(count: int, side: int) -> Tensor:
    """Of each of `count` patches along an axis, the learned position, of `side`, that its share of the axis falls on.

    The step is a float32, as the authors compute it: where a patch begins on a boundary, its rounding decides.
    """
    step = float(1 / torch.tensor(count, dtype=torch.int32))
    return torch.bucketize(torch.arange(0, 1 - 1e-6, step), torch.arange(1 / side, 1.0, 1 / side), right=True)


class OriginalMiniCpmTower(ResampledTower):
    """SigLIP on slices of any size, each patch with the learned position nearest to its own."""

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
        model, side = self.model, self.geometry.patch
        implementation = model.config._attn_implementation  # noqa: SLF001 - set by use_attention
        patches = model.embeddings.patch_embedding(pixels.view(len(pixels), -1, side, side)).flatten(1)
        states = (patches + model.embeddings.position_embedding(tensors["positions"])).unsqueeze(0)
        states = packed_layers(model.encoder.layers, states, implementation, attended)
        return self._resampled(model.post_layernorm(states[0]), tensors, attended)


@dataclass(frozen=True, kw_only=True)
class OriginalMiniCpm(RasterFamily):
    """Checkpoints whose config.json has the fields of the language model beside those of the tower."""

    versions: Sequence[float]
    """Values of `version` that are served."""

    def read_config(self, folder: Path, settings: Mapping[str, Any]) -> Config:
        """See Family. Raises ValueError over a version whose tower takes positions in another way."""
        del folder
        version = settings.get("version")
        if version is None or float(version) not in self.versions:
            known = ", ".join(map(str, self.versions))
            raise ValueError(f"version is {version!r}, but must be one of {known}")
        vision = dict(settings["vision_config"])
        dropped = int(bool(settings.get("drop_vision_last_layer")))
        config = siglip_config(
            {
                **{name: vision[name] for name in _VISION if name in vision},
                "num_hidden_layers": vision["num_hidden_layers"] - dropped,
            },
            width=settings["hidden_size"],
            dtype=dtype_of(settings),
        )
        return changed(config, {"query_num": settings["query_num"]})


_MINICPMV = OriginalMiniCpm(
    model_type="minicpmv",
    title="MiniCPM-V 2.6, 4.0 and 4.5",
    versions=(2.6, 4.0, 4.5),
    tower=siglip("vpm."),
    beside={
        "resampler": Module(
            source="vitwire_server.towers.shared.resampler:Resampler",
            prefixes=stripped("resampler."),
            config="",
            served=(Served("query_num", lambda count, _: 0 < count < 4096, "from 1 to 4095"),),
        )
    },
    architecture="27 x 1152, patch 14",
    width="text_config.hidden_size",
    forward=OriginalMiniCpmTower,
    layers="encoder.layers",
    processor=_settings,
    images=Accepts.PIXELS,
    videos=Accepts.NOTHING,
    special="each slice is an image; a resampler makes 64 tokens of it",
)

_MINICPMO = replace(
    _MINICPMV,
    model_type="minicpmo",
    title="MiniCPM-o 2.6 and 4.5",
    versions=(2.6, 4.5),
    special="each slice is an image; a resampler makes 64 tokens of it; audio stays with the LLM",
)

ROWS: tuple[Family, ...] = (_MINICPMV, _MINICPMO)
