"""Packed towers whose rows pass through a module beside the tower: projectors, and pooling over frames."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from torch import Tensor

from vitwire_server.core.models import ClipGeometry, Geometry
from vitwire_server.towers.family import Parts
from vitwire_server.towers.layouts.packed import PackedFamily, PackedTower


class ProjectedTower(PackedTower):
    """A tower with a projector beside it that takes the tower's rows as they are."""

    def __init__(self, family: PackedFamily, parts: Parts, config: Any) -> None:  # noqa: ANN401
        super().__init__(family, parts, config)
        self.projector: Any = parts["projector"]

    def _finish(self, output: Any, tensors: Mapping[str, Tensor]) -> Tensor:  # noqa: ANN401
        del tensors
        rows: Tensor = self.projector(output.last_hidden_state.flatten(0, -2))
        return rows


def of_clips(geometry: Geometry, *, most_frames: int | None = None, pooled: int = 1) -> ClipGeometry:
    """The same sizes, of a tower that is particular about the frames of a clip."""
    return ClipGeometry(**asdict(geometry), most_frames=most_frames, pooled=pooled)
