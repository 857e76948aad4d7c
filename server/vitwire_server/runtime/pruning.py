"""Efficient Video Sampling (arXiv 2510.14624): tokens that repeat the frame before them are left out."""

from collections.abc import Sequence

import torch
from torch import Tensor

from vitwire_server.core.items import Item

_TINY = 1e-8
"""Norm below which a row has no direction; it then resembles nothing."""


def prune(
    items: Sequence[Item], parts: Sequence[Tensor], rows: Sequence[Tensor], *, main: int
) -> tuple[list[Tensor], Tensor]:
    """The rows that each item asks for, and the tokens that were kept, of one item after the other.

    `parts` are the tower's own rows, by whose first `main` columns tokens are chosen; `rows` are the
    same in the type asked for. Rows of items that are not pruned are passed on as they are.
    """
    kept = {
        i: kept_tokens(parts[i][:, :main], item.grid.t, item.rows) for i, item in enumerate(items) if item.keep_ratio
    }
    chosen = [own.index_select(0, kept[i]) if i in kept else own for i, own in enumerate(rows)]
    none = torch.empty(0, dtype=torch.int64, device=rows[0].device)
    return chosen, torch.cat([none, *kept.values()])


def kept_tokens(main: Tensor, frames: int, retained: int) -> Tensor:
    """Indices `(retained,)`, ascending, of the tokens to keep of a clip's rows `(tokens, width)`.

    The first frame stays whole; beside it stay the tokens that differ most, by cosine, from the token
    at the same place one frame before; the earlier one where two differ as much. `retained` is at
    least the tokens of one frame. Shapes follow from the arguments alone: nothing waits for the device.
    """
    tokens = main.shape[0] // frames
    first = torch.arange(tokens, device=main.device)
    order = _changes(main.unflatten(0, (frames, tokens))).argsort(descending=True, stable=True)
    return torch.cat([first, order[: retained - tokens].sort().values + tokens])


def _changes(rows: Tensor) -> Tensor:
    """One minus the cosine of each token with its predecessor, `((frames - 1) * tokens,)`, in float32.

    Taken as half the squared distance of the directions, which is the same and exactly 0 for equal
    rows, where `1 - cos` would leave rounding noise to decide.
    """
    rows = rows.float()
    norms = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    directions = rows / norms.clamp_min(_TINY)
    halves = (directions[1:] - directions[:-1]).square().sum(dim=-1) / 2
    directed = (norms[1:] > _TINY) & (norms[:-1] > _TINY)
    return torch.where(directed.squeeze(-1), halves, 1.0).flatten()
