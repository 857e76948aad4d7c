"""Heads of packed towers: what follows the stock tower, such as a projector or pooling over frames."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor

from vitwire_server.core.grids import Grid
from vitwire_server.core.models import ClipGeometry, Geometry
from vitwire_server.towers.family import Parts
from vitwire_server.towers.metadata import Kind

if TYPE_CHECKING:
    from vitwire_server.towers.configs import Config


class Output(Protocol):
    """The output of a stock tower, as far as heads read it."""

    last_hidden_state: Tensor
    pooler_output: Tensor
    deepstack_features: Sequence[Tensor]


class Head:
    """From a tower's output to rows. This one takes the tokens that the tower merged, and projects them if it can."""

    pools_frames: ClassVar[bool] = False
    """Tokens of a clip are of several frames each."""
    pools_clips: ClassVar[bool] = False
    """A token of a clip is of more patches of a frame than one of an image."""

    def __init__(self, parts: Parts, bare: Geometry) -> None:
        """`parts` are the loaded modules, `bare` the sizes of the tower alone."""
        self.config: Config = parts["tower"].config
        self.projector: Any = parts.get("projector")
        self.geometry = self.sizes(bare)

    def sizes(self, bare: Geometry) -> Geometry:
        """Sizes of the tower with its head."""
        return bare

    def inputs(self) -> dict[str, Kind]:
        """The metadata that the head needs in addition to the tower's."""
        return {}

    def compute(self, grid: Grid) -> dict[str, Tensor]:
        """That metadata of an item that is alone, on the host."""
        return {}

    def keywords(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Keyword arguments that the tower takes of the head's metadata."""
        return {}

    def rows(self, output: Output, tensors: Mapping[str, Tensor]) -> Tensor:
        """Rows `(tokens, width)`."""
        return self.projector(output.pooler_output) if self.projector else output.pooler_output


class Deepstack(Head):
    """Features of inner layers behind the tower's own: `[main | level 0 | level 1 | ...]`."""

    def sizes(self, bare: Geometry) -> Geometry:
        levels = len(self.config.deepstack_visual_indexes)
        return replace(bare, width=bare.width * (1 + levels), levels=levels)

    def rows(self, output: Output, tensors: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([output.pooler_output, *output.deepstack_features], dim=-1)


class Projected(Head):
    """A projector that takes the tower's last layer as it is."""

    def rows(self, output: Output, tensors: Mapping[str, Tensor]) -> Tensor:
        rows: Tensor = self.projector(output.last_hidden_state.flatten(0, -2))
        return rows


def of_clips(
    geometry: Geometry, *, most_frames: int | None = None, pooled: int = 1, clip_merge: int = 1
) -> ClipGeometry:
    """The same sizes, of a tower that restricts the frames of a clip, or merges more of them."""
    return ClipGeometry(**asdict(geometry), most_frames=most_frames, pooled=pooled, clip_merge=clip_merge)
