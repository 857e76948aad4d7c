"""Towers of packed patches: all items in one sequence, attention within segments of it."""

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil

import torch
from torch import Tensor, nn
from transformers import vision_utils
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from vitwire_server.core.budgets import Budget
from vitwire_server.core.grids import Grid
from vitwire_server.towers.family import Family, Parts
from vitwire_server.towers.metadata import Boundaries, Capacity, Kind
from vitwire_server.towers.rewrites import aligned_mlps, linear_patches
from vitwire_server.towers.tower import Metadata, Tower

TAPS = {"bilinear": 4, "bicubic": 16}
"""Neighbours that a resampled learned position is made of."""
_KEPT_BYTES = 1 << 27
"""Bytes of metadata kept per grid: about 64 a patch, or a row of columns if positions are resampled ahead."""


@dataclass(frozen=True, kw_only=True)
class PatchFamily(Family):
    """Fields of every family of packed patches."""

    width: str = "text_config.hidden_size"
    """Path of the field that holds the columns of an embedding's main part, in the whole configuration."""
    layers: str = "blocks"
    """Path of the tower's layers."""


class PatchTower(Tower):
    """A tower whose metadata is measured once for each grid, and laid out for each batch.

    Each class names in `_inputs` what its forward takes, and adds to `_compute` what that is for an item alone.
    """

    def __init__(self, family: PatchFamily, parts: Parts) -> None:
        """`parts` are the modules of `family`, loaded; they stay where they are."""
        self.family = family
        self.model = parts["tower"]
        self.modules = parts
        self.blocks = list(self.model.get_submodule(family.layers))
        self._measured: OrderedDict[Grid, dict[str, Tensor]] = OrderedDict()
        self._kept_bytes = 0

    @cached_property
    def _kinds(self) -> Mapping[str, Kind]:
        """All metadata of a forward, by name."""
        return {"cu_seqlens": Boundaries(slots=lambda c: c.segments, longest=lambda c: c.longest), **self._inputs()}

    @abstractmethod
    def _inputs(self) -> dict[str, Kind]:
        """The metadata that the forward takes in addition to the ends of its segments."""

    def rewrite(self) -> None:
        linear_patches(self.model)
        if self.device.type == "cuda":
            aligned_mlps(self.model)

    def capacity(self, budget: Budget) -> Capacity:
        patches = budget.tokens * self.geometry.merge**2
        return Capacity(
            patches=patches,
            tokens=budget.tokens,
            segments=budget.max_segments + ceil(patches / budget.max_segment_patches),
            longest=budget.max_segment_patches,
        )

    def reserve(self, capacity: Capacity) -> Metadata:
        tensors = {key: kind.allocate(capacity, self.device) for key, kind in self._kinds.items()}
        return Metadata(capacity, tensors, {"max_seqlen": capacity.longest})

    def prepare(self, grids: Sequence[Grid], metadata: Metadata) -> None:
        """See Tower. Raises ValueError if the batch has more segments than the capacity has slots."""
        measured = [self._measure(grid) for grid in grids]
        patches = [grid.patches for grid in grids]
        for key, kind in self._kinds.items():
            kind.lay(metadata.tensors[key], [own[key] for own in measured], patches, metadata.capacity)

    def _compute(self, grid: Grid) -> dict[str, Tensor]:
        """The metadata of an item that is alone, on the host."""
        return self._ends(grid)

    @staticmethod
    def _ends(grid: Grid) -> dict[str, Tensor]:
        """The ends of an item's frames."""
        return {"cu_seqlens": torch.arange(1, grid.t + 1, dtype=torch.int32) * grid.frame_patches}

    def _measure(self, grid: Grid) -> dict[str, Tensor]:
        """The metadata of an item that is alone, kept per grid (least recently used leave)."""
        if grid in self._measured:
            self._measured.move_to_end(grid)
            return self._measured[grid]
        computed = self._compute(grid)
        measured = {
            key: computed[key] if kind.on_host else _to_device(computed[key], self.device)
            for key, kind in self._kinds.items()
        }
        self._measured[grid] = measured
        self._kept_bytes += _bytes(measured)
        while self._kept_bytes > _KEPT_BYTES and len(self._measured) > 1:
            _, oldest = self._measured.popitem(last=False)
            self._kept_bytes -= _bytes(oldest)
        return measured


def _bytes(measured: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in measured.values())


def attend(module: nn.Module, implementation: str, heads: Sequence[Tensor], **attended: object) -> Tensor:
    """Packed attention by the function that transformers knows by this name, for modules that it is not handed on to.

    `heads` are queries, keys and values `(1, rows, heads, head_dim)`, the result is of the queries' shape; `attended`
    are the boundaries, and `scaling`.
    """
    heads_first = (each.transpose(1, 2) for each in heads)
    rows, _ = ALL_ATTENTION_FUNCTIONS[implementation](
        module, *heads_first, None, dropout=0.0, is_causal=False, **attended
    )
    return rows  # type: ignore[no-any-return]


def taps(
    rows: int, columns: int, side: int, *, mode: str = "bilinear", align_corners: bool = False, block: int = 1
) -> tuple[Tensor, Tensor]:
    """For each patch of a frame, the places in a square table of this side, and their weights: `(patches, taps)` both.

    Patches lie in blocks of this side, one after the other.
    """
    indices, weights = vision_utils.get_vision_interpolation_indices_and_weights(
        torch.tensor([(1, rows, columns)]), side, mode, align_corners, block
    )
    return indices, weights


def neighbours(grid: Grid, merge: int) -> Tensor:
    """Numbers of the patches of each token, `(tokens, merge**2)`, if they lie in raster order."""
    patches = torch.arange(grid.patches).view(grid.t, grid.h // merge, merge, grid.w // merge, merge)
    return patches.permute(0, 1, 3, 2, 4).reshape(-1, merge**2)


def most_windows(cells: int, segments: int, side: int) -> int:
    """Bound of the windows of this side that any frames of `cells` in total need, padding included.

    A frame of h x w cells has ceil(h/s)*ceil(w/s) <= h*w/s + (s-1)/s windows of side s.
    """
    return ceil(cells / side + segments * (side - 1) / side) + 1


def _to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on the device, made without waiting for it."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
