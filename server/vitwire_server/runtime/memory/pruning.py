"""Efficient Video Sampling (arXiv 2510.14624): drops tokens that repeat the previous frame."""

from collections.abc import Sequence

import torch
from torch import Tensor

from vitwire_server.core.items import Item

_TINY = 1e-8
"""Norm below which a row has no direction and counts as different from all others."""


def prune(
    items: Sequence[Item], parts: Sequence[Tensor], rows: Sequence[Tensor], *, main: int
) -> tuple[list[Tensor], Tensor]:
    """The rows to return for each item, and the concatenated indices of kept tokens.

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
