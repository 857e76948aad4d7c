"""Before and after a forward, on the device: pixels become the tower's input, its rows are copied and selected."""

from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from vitwire_server.core.items import Item, Modality
from vitwire_server.core.models import Geometry, Preprocessing
from vitwire_server.preparing.rules.recipe import affine
from vitwire_server.runtime.toolchain import triton_fault

_TINY = 1e-8
"""Norm below which a row has no direction and counts as different from all others."""


class Stager:
    """Writes pixels into the tower's input.

    Accepts floats as from the Hugging Face processor, or uint8 before rescaling and normalisation; images may have one
    frame where the processor would duplicate it.
    """

    def __init__(
        self, geometry: Geometry, preprocessing: Mapping[Modality, Preprocessing], device: torch.device
    ) -> None:
        self._geometry = geometry
        self._affine = {modality: self._scaling(settings, device) for modality, settings in preprocessing.items()}
        self._crops = {
            modality: self._scaling(settings.of_crops, device) for modality, settings in preprocessing.items()
        }

    def stage(self, source: Tensor, modality: Modality, out: Tensor, *, crops: bool = False) -> None:
        """Write `patches * C*T*p*p` or `patches * C*1*p*p` elements into `out (patches, C*T*p*p)`.

        A tile is one row of `C*H*W` elements; `crops` may be normalised differently.
        """
        geometry, patches = self._geometry, len(out)
        if geometry.channels_last:
            shaped = source.view(patches, -1, geometry.channels)
            target = out.view(shaped.shape)
        else:
            area = out.shape[1] // (geometry.channels * geometry.temporal)
            shaped = source.view(patches, geometry.channels, -1, area)
            target = out.view(patches, geometry.channels, geometry.temporal, area)
        if source.dtype is torch.uint8:
            scale, offset = (self._crops if crops else self._affine)[modality]
            torch.add(torch.mul(shaped, scale).expand(target.shape), offset, out=target)
        else:
            target.copy_(shaped)

    def _scaling(self, settings: Preprocessing, device: torch.device) -> tuple[Tensor, Tensor]:
        """Scale and offset per channel, `(C,)` or `(C, 1, 1)` float32."""
        sizes = (-1,) if self._geometry.channels_last else (-1, 1, 1)
        scale, offset = (torch.tensor(values, device=device).view(sizes) for values in affine(settings))
        return scale, offset


def copied_and_checked(parts: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> tuple[list[Tensor], Tensor]:
    """A copy of each of `parts (rows, width)` in its type, and whether each row of them is finite, `(all rows,)`."""
    if not parts or not parts[0].is_cuda or not _has_triton():
        copies = [part.to(dtype, copy=True) for part, dtype in zip(parts, dtypes, strict=True)]
        return copies, torch.cat([_finite(copy) for copy in copies])
    from vitwire_server.runtime.kernels.rowwise import copy_checked  # noqa: PLC0415 - triton comes with CUDA builds

    counts = [len(part) for part in parts]
    finite = torch.empty(sum(counts), dtype=torch.bool, device=parts[0].device)
    copies = [
        torch.empty(part.shape, dtype=dtype, device=part.device) for part, dtype in zip(parts, dtypes, strict=True)
    ]
    for part, copy, flags in zip(parts, copies, torch.split(finite, counts), strict=True):
        copy_checked(part, copy, flags)
    return copies, finite


@lru_cache
def _has_triton() -> bool:
    return not triton_fault()


def _finite(rows: Tensor) -> Tensor:
    """`(rows,)`: whether all values of each row are finite. aminmax takes one pass and propagates NaN."""
    low, high = torch.aminmax(rows, dim=1)
    return low.isfinite() & high.isfinite()


def prune(
    items: Sequence[Item], parts: Sequence[Tensor], rows: Sequence[Tensor], *, main: int
) -> tuple[list[Tensor], Tensor]:
    """The rows to return for each item, and the indices of kept tokens: Efficient Video Sampling (arXiv 2510.14624).

    Tokens are chosen by the first `main` columns of `parts`, the tower's rows; `rows` are the same in the output type.
    Rows of items without pruning are returned as they are.
    """
    kept = {
        i: kept_tokens(parts[i][:, :main], item.grid.t, item.rows) for i, item in enumerate(items) if item.keep_ratio
    }
    chosen = [own.index_select(0, kept[i]) if i in kept else own for i, own in enumerate(rows)]
    none = torch.empty(0, dtype=torch.int64, device=rows[0].device)
    return chosen, torch.cat([none, *kept.values()])


def kept_tokens(main: Tensor, frames: int, retained: int) -> Tensor:
    """Indices `(retained,)`, ascending, of the tokens to keep of a clip's rows `(tokens, width)`.

    All tokens of the first frame are kept, then those that differ most, by cosine, from the token at the same position
    in the previous frame; ties go to the earlier token. `retained` is at least the tokens of one frame. Shapes depend
    only on the arguments, so nothing waits for the device.
    """
    tokens = main.shape[0] // frames
    first = torch.arange(tokens, device=main.device)
    order = _changes(main.unflatten(0, (frames, tokens))).argsort(descending=True, stable=True)
    return torch.cat([first, order[: retained - tokens].sort().values + tokens])


def _changes(rows: Tensor) -> Tensor:
    """One minus the cosine of each token and its predecessor, `((frames - 1) * tokens,)`, in float32.

    Computed as half the squared distance of the directions, which is exactly 0 for equal rows, unlike `1 - cos`.
    """
    rows = rows.float()
    norms = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    directions = rows / norms.clamp_min(_TINY)
    halves = (directions[1:] - directions[:-1]).square().sum(dim=-1) / 2
    directed = (norms[1:] > _TINY) & (norms[:-1] > _TINY)
    return torch.where(directed.squeeze(-1), halves, 1.0).flatten()
