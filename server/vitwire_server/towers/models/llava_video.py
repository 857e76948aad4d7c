"""LLaVA-NeXT-Video."""

from collections.abc import Mapping
from dataclasses import asdict
from math import isqrt

import torch
from torch import Tensor
from transformers.models.llava_next_video.modeling_llava_next_video import LlavaNextVideoPooler

from vitwire_server.core.footprints import PooledFrameFootprints
from vitwire_server.core.geometries import PooledFrameGeometry
from vitwire_server.core.grids import Grid
from vitwire_server.core.items import Modality
from vitwire_server.core.models import Preprocessing
from vitwire_server.towers.configs import Config
from vitwire_server.towers.family import Family, Parts, projector
from vitwire_server.towers.layouts.assembled import AssembledEncoder, AssembledFamily, Unit, UnitInput
from vitwire_server.towers.models.llava import next_settings
from vitwire_server.towers.processors.settings import CLIP, ProcessorFiles
from vitwire_server.towers.processors.tiles import one_tile
from vitwire_server.towers.served import Served
from vitwire_server.towers.shared.clip import clip
from vitwire_server.towers.shared.projected import ProjectedLayers

_POOLED = Served("spatial_pool_mode", lambda mode, _: mode in ("average", "max"), "'average' or 'max'")
"""Without weights of its own."""


def _settings(files: ProcessorFiles, config: Config) -> dict[Modality, Preprocessing]:
    images = next_settings(files, config)
    tiling = images[Modality.IMAGE].tiling
    if tiling and (1, 1) in tiling.layouts:
        raise ValueError("image_grid_pinpoints with a single tile are not served, as the grid (2, 1, 1) is a clip")
    return {**images, Modality.VIDEO: one_tile(files.video, config.vision_config.image_size, CLIP)}


class LlavaNextVideo(ProjectedLayers, AssembledEncoder):
    """Every tile is projected twice, as it is and pooled: images are made of the former rows, clips of the latter."""

    def __init__(self, parts: Parts, config: Config) -> None:
        super().__init__(parts, config)
        self._pool = LlavaNextVideoPooler(config)
        tokens, longest = self.tile.tokens, (self.tile.height // self.patch) ** 2
        self._frame = (isqrt(tokens) // config.spatial_pool_stride) ** 2
        self.unit = Unit(1, tokens, tokens + self._frame, longest)
        self.inputs: Mapping[str, UnitInput] = {}
        self.footprints = PooledFrameFootprints(tokens, self._frame, longest)

    @property
    def geometry(self) -> PooledFrameGeometry:
        return PooledFrameGeometry(**asdict(super().geometry))

    def sample(self, units: int) -> Grid:
        return Grid(units, 1, max(1, units - 1))

    def lay(self, grid: Grid) -> tuple[Mapping[str, Tensor], Tensor]:
        """See AssembledEncoder."""
        rows = torch.arange(grid.t * self.unit.rows).view(grid.t, -1)
        of_clip = grid.h * grid.w == 1
        own = rows[:, self.unit.tokens :] if of_clip else rows[:, : self.unit.tokens]
        return {}, own.flatten()

    def encode_units(self, tiles: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        """See AssembledEncoder."""
        del inputs
        rows = self.rows(tiles)
        return self.projected(torch.cat([rows, self._pool(rows)], dim=1))


_LLAVA_NEXT_VIDEO = AssembledFamily(
    model_type="llava_next_video",
    title="LLaVA-NeXT-Video",
    architecture="24 x 1024, patch 14",
    tower=clip("vision_tower."),
    beside=projector(
        "llava_next_video.modeling_llava_next_video:LlavaNextVideoMultiModalProjector",
        served=(_POOLED,),
    ),
    encoder=LlavaNextVideo,
    processor=_settings,
    special="images as LLaVA-NeXT, with the layout of their tiles in the grid; rows of frames are pooled",
)

ROWS: tuple[Family, ...] = (_LLAVA_NEXT_VIDEO,)
