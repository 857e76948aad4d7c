"""Packed towers whose rows pass through a module beside the tower: projectors, and pooling over frames."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from vitwire_server.core.grids import Footprint, Grid
from vitwire_server.core.models import ClipGeometry, Geometry
from vitwire_server.towers.family import Parts
from vitwire_server.towers.metadata import Rows, Sources
from vitwire_server.towers.layouts.packed import PackedFamily, PackedTower, frame_of
from vitwire_server.towers.layouts.patches import neighbours


class ProjectedTower(PackedTower):
    """A tower with a projector beside it that takes the tower's rows as they are."""

    def __init__(self, family: PackedFamily, parts: Parts, config: Any) -> None:  # noqa: ANN401
        super().__init__(family, parts, config)
        self.projector: Any = parts["projector"]

    def _finish(self, output: Any, tensors: Mapping[str, Tensor]) -> Tensor:  # noqa: ANN401
        del tensors
        rows: Tensor = self.projector(output.last_hidden_state.flatten(0, -2))
        return rows


class PaddleTower(ProjectedTower):
    """Patches in raster order, which only the projector groups to tokens; single images."""

    after = frozenset({"patches"})

    def __init__(self, family: PackedFamily, parts: Parts, config: Any) -> None:  # noqa: ANN401
        super().__init__(family, parts, config)
        self.geometry = _of_clips(self.geometry, most_frames=1)
        self._kinds["patches"] = Sources(self.geometry.merge**2)

    def _compute(self, grid: Grid) -> dict[str, Tensor]:
        return super()._compute(grid) | {"patches": neighbours(grid, self.geometry.merge)}

    def _shaped(self, pixels: Tensor) -> Tensor:
        side = self.geometry.patch
        return pixels.view(1, len(pixels), -1, side, side)

    def _finish(self, output: Any, tensors: Mapping[str, Tensor]) -> Tensor:  # noqa: ANN401
        projector = self.projector
        patches = projector.pre_norm(output.last_hidden_state)[tensors["patches"]]
        rows: Tensor = projector.linear_2(projector.act(projector.linear_1(patches.flatten(1))))
        return rows


class KimiTower(ProjectedTower):
    """Attention over a whole chunk of a clip, whose frames are averaged; then the projector."""

    after = frozenset({"patches", "shares"})

    def __init__(self, family: PackedFamily, parts: Parts, config: Any) -> None:  # noqa: ANN401
        super().__init__(family, parts, config)
        self._chunk: int = self.model.config.pos_emb_time
        """Frames at most."""
        self.geometry = _of_clips(self.geometry, most_frames=self._chunk, pooled=0)
        self._kinds |= {
            "frame_index": Rows((), torch.int64),
            "patches": Sources(self._chunk * self.geometry.merge**2),
            "shares": Rows((self._chunk,), torch.float32, per_token=True),
        }

    def footprint(self, grid: Grid) -> Footprint:
        """See Tower."""
        frame = grid.frame_patches // self.geometry.merge**2
        return super().footprint(grid)._replace(pooled=frame * (grid.t - 1))

    def _compute(self, grid: Grid) -> dict[str, Tensor]:
        """Chunks of fewer frames name their first one for those that they lack, with a share of 0."""
        patches = neighbours(grid, self.geometry.merge).unflatten(0, (grid.t, -1)).transpose(0, 1)
        lacking = patches[:, :1].expand(-1, self._chunk - grid.t, -1)
        shares = torch.zeros(len(patches), self._chunk)
        shares[:, : grid.t] = 1 / grid.t
        return super()._compute(grid) | {
            "frame_index": frame_of(grid) + int(grid.t > 1),
            "patches": torch.cat([patches, lacking], dim=1).flatten(1),
            "shares": shares,
        }

    def _shaped(self, pixels: Tensor) -> Tensor:
        side = self.geometry.patch
        return pixels.view(len(pixels), -1, side, side)

    def _given(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tower's own pooling takes clips of one length only: it gets a single token, which nobody uses."""
        return super()._given(tensors) | {"temporal_merge_index": tensors["patches"][:1, :, None]}

    def _finish(self, output: Any, tensors: Mapping[str, Tensor]) -> Tensor:  # noqa: ANN401
        hidden = output.last_hidden_state
        frames = tensors["patches"].unflatten(1, (self._chunk, -1)).unbind(1)
        shares = tensors["shares"].unbind(1)
        mean = sum(hidden[frame] * share[:, None, None] for frame, share in zip(frames, shares, strict=True))
        rows: Tensor = self.projector(mean.to(hidden.dtype)).squeeze(1)
        return rows


class ErnieTower(ProjectedTower):
    """Tokens of two frames become one; an image is its own second frame."""

    after = frozenset({"pairs"})

    def __init__(self, family: PackedFamily, parts: Parts, config: Any) -> None:  # noqa: ANN401
        super().__init__(family, parts, config)
        self.geometry = _of_clips(self.geometry, pooled=2)
        self._kinds["pairs"] = Sources(2, patches=self.geometry.merge**2)

    def footprint(self, grid: Grid) -> Footprint:
        """See Tower."""
        own = super().footprint(grid)
        return own._replace(pooled=own.tokens // 2 if grid.t > 1 else 0)

    def _compute(self, grid: Grid) -> dict[str, Tensor]:
        frame = torch.arange(grid.frame_patches // self.geometry.merge**2)
        starts = torch.arange(grid.t).view(-1, 2) if grid.t > 1 else torch.zeros(1, 2, dtype=torch.int64)
        pairs = starts[:, None] * len(frame) + frame[:, None]
        return super()._compute(grid) | {"pairs": pairs.flatten(0, 1)}

    def _finish(self, output: Any, tensors: Mapping[str, Tensor]) -> Tensor:  # noqa: ANN401
        resampler, hidden = self.projector, output.last_hidden_state
        tokens = resampler.spatial_linear(hidden.reshape(-1, self.geometry.merge**2 * hidden.shape[-1]))
        pairs = resampler.temporal_linear(tokens[tensors["pairs"]].flatten(1))
        rows: Tensor = resampler.after_norm(resampler.mlp(pairs))
        return rows


def _of_clips(geometry: Geometry, *, most_frames: int | None = None, pooled: int = 1) -> ClipGeometry:
    """The same sizes, of a tower that is particular about the frames of a clip."""
    return ClipGeometry(**asdict(geometry), most_frames=most_frames, pooled=pooled)
