"""LFM2-VL (Liquid AI)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from vitwire_server.core.grids import Grid
from vitwire_server.core.items import Modality
from vitwire_server.core.models import Preprocessing, Resizing
from vitwire_server.towers.configs import Config
from vitwire_server.towers.family import Accepts, Family, Module, in_model, projector
from vitwire_server.towers.layouts.patches import neighbours
from vitwire_server.towers.metadata import Kind, Sources
from vitwire_server.towers.models.siglip import Siglip2Family, Siglip2Tower
from vitwire_server.towers.processors.settings import BILINEAR, HALF, ProcessorFiles, bounded


def _settings(files: ProcessorFiles, config: Config) -> dict[Modality, Preprocessing]:
    """The processor makes several images of a large one: parts of one size, and an overview of another."""
    del config
    return {Modality.IMAGE: replace(bounded(files.image, (1, 1), HALF, BILINEAR), resizing=Resizing.OTHER)}


class Lfm2VlTower(Siglip2Tower):
    """SigLIP 2 with a projector that unshuffles squares of patches."""

    def _inputs(self) -> dict[str, Kind]:
        return {**super()._inputs(), "squares": Sources(self.geometry.merge**2)}

    def _compute(self, grid: Grid) -> dict[str, Tensor]:
        return {**super()._compute(grid), "squares": neighbours(grid, self.geometry.merge)}

    def _rows(self, pixels: Tensor, tensors: Mapping[str, Tensor], attended: Mapping[str, Any]) -> Tensor:
        """Each token's patches are an image to the projector, which makes one row of it."""
        patches = super()._rows(pixels, tensors, attended)[tensors["squares"]]
        rows: Tensor = self._projector(patches.unflatten(1, (self.geometry.merge, -1)))
        return rows.flatten(0, 2)


_LFM2_VL = Siglip2Family(
    model_type="lfm2_vl",
    title="LFM2-VL",
    architecture="12 x 768 or 27 x 1152, patch 16",
    tower=Module(
        source="siglip2.modeling_siglip2:Siglip2VisionModel",
        prefixes=in_model("vision_tower.vision_model.", "vision_tower."),
        ignored=("head.",),
    ),
    beside=projector("lfm2_vl.modeling_lfm2_vl:Lfm2VlMultiModalProjector"),
    width="text_config.hidden_size",
    merge="downsample_factor",
    forward=Lfm2VlTower,
    channels_last=True,
    layers="encoder.layers",
    processor=_settings,
    images=Accepts.PIXELS,
    videos=Accepts.NOTHING,
    special="each part of a large image, and its overview, is an image of its own",
)

ROWS: tuple[Family, ...] = (_LFM2_VL,)
