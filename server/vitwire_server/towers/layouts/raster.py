"""Packed towers without `grid_thw`: images of any size as patches in raster order."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitwire_server.core.footprints import Footprints, PatchFootprints
from vitwire_server.core.grids import Grid
from vitwire_server.core.items import Modality
from vitwire_server.core.models import Geometry, Preprocessing
from vitwire_server.towers.configs import Config, at
from vitwire_server.towers.family import Accepts, Parts
from vitwire_server.towers.layouts.patches import PatchFamily, PatchTower
from vitwire_server.towers.metadata import Capacity
from vitwire_server.towers.processors.settings import ReadProcessor, read_settings
from vitwire_server.towers.tower import Metadata


@dataclass(frozen=True, kw_only=True)
class RasterFamily(PatchFamily):
    """Entries whose tower is a RasterTower."""

    forward: "type[RasterTower]"
    """The tower's class."""
    merge: str | None = None
    """Path of the field with the root of a token's patches, in the whole configuration; None for one patch a token."""
    layers: str = "encoder.layers"
    channels_last: bool = False
    """The processor emits the columns of a patch as (p, p, C)."""
    processor: ReadProcessor
    videos: Accepts = Accepts.NOTHING
    layout = "packed patches, raster order"

    def build(self, parts: Parts, config: Config) -> "RasterTower":
        return self.forward(self, parts, config)

    def preprocessing(self, folder: Path, config: Config) -> dict[Modality, Preprocessing]:
        own = self.processor
        return read_settings(folder, lambda files: own(files, config), in_code=self.in_code, converts=self.converts)


class RasterTower(PatchTower):
    """Attention within images; what a family's stock forward derives from image sizes is laid out ahead."""

    family: RasterFamily

    def __init__(self, family: RasterFamily, parts: Parts, config: Config) -> None:
        """`config` is the whole checkpoint's."""
        super().__init__(family, parts)
        self._pool = family.pooler.make(parts, config) if family.pooler else None
        self.geometry = self._geometry(config)
        if self._pool:
            self.geometry = replace(self.geometry, width=self._pool.width, one_row=True)
        self._projector: Any = parts.get("projector")
        vision: Config = self.model.config
        sizes = (getattr(vision, name, None) for name in ("head_dim", "d_kv"))
        heads = vision.num_attention_heads
        self.attention_heads = heads, next(filter(None, sizes), vision.hidden_size // heads)

    def _geometry(self, config: Config) -> Geometry:
        """Sizes of the tower; `config` is the whole checkpoint's."""
        vision: Config = self.model.config
        return Geometry(
            patch=vision.patch_size,
            merge=1 if self.family.merge is None else at(config, self.family.merge),
            temporal=1,
            channels=getattr(vision, "num_channels", 3),
            width=at(config, self.family.width),
            levels=0,
            raster=True,
            channels_last=self.family.channels_last,
        )

    @cached_property
    def footprint(self) -> Footprints:
        geometry = self.geometry
        return PatchFootprints(geometry.merge, one_row=geometry.one_row, line_ends=geometry.line_ends)

    def rows(self, capacity: Capacity) -> int:
        return capacity.segments if self._pool else capacity.tokens

    def forward(self, pixels: Tensor, metadata: Metadata) -> Tensor:
        """`pixels (patches, columns)` to rows `(tokens, width)`, or `(segments, width)` if they are pooled."""
        tensors = metadata.tensors
        boundaries, longest = tensors["cu_seqlens"], metadata.bounds["max_seqlen"]
        attended = {
            "cu_seq_lens_q": boundaries,
            "cu_seq_lens_k": boundaries,
            "max_length_q": longest,
            "max_length_k": longest,
        }
        rows = self._rows(pixels, tensors, attended)
        return self._pool.row(rows, boundaries, longest) if self._pool else rows

    @abstractmethod
    def _rows(self, pixels: Tensor, tensors: Mapping[str, Tensor], attended: Mapping[str, Any]) -> Tensor:
        """Rows `(tokens, width)`; `attended` are the keyword arguments of packed attention."""


def places(grid: Grid) -> Tensor:
    """Row and column of each patch, `(patches, 2)`, frame after frame."""
    rows = torch.arange(grid.h).repeat_interleave(grid.w)
    columns = torch.arange(grid.w).repeat(grid.h)
    return torch.stack([rows, columns], dim=1).repeat(grid.t, 1)
