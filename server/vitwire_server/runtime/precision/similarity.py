"""How close a tower's rows are to those of its plain forward: after a reduction to float8, or once compiled."""

import torch
from torch import Tensor

from vitwire_server.core.errors import EncoderError
from vitwire_server.runtime.engine import Engine
from vitwire_server.runtime.precision.pictures import picture_items
from vitwire_server.towers.tower import Tower

_TOKENS, _PICTURES = 768, 3


class Comparison:
    """The rows of a few pictures, before and after a change of the tower. Its forwards are eager."""

    def __init__(self, tower: Tower, engine: Engine) -> None:
        """Encodes the pictures. Raises EncoderError."""
        self._engine = engine
        self._parts = 1 + tower.geometry.levels
        self._items = picture_items(tower, tower.samples(_TOKENS, _PICTURES + 1))
        self._before = self._rows()

    def similarities(self) -> Tensor:
        """Of each row, the cosine of its least similar part, main or deepstack level; NaN if encoding fails."""
        try:
            after = self._rows()
        except EncoderError:
            return torch.full((len(self._before),), torch.nan, dtype=torch.float64)
        return least_cosines(self._before, after, self._parts)

    def _rows(self) -> Tensor:
        """Of all pictures. Each is encoded alone. Raises EncoderError."""
        rows = []
        for item in self._items:
            (result,) = self._engine.launch([item], None).collect().results
            if isinstance(result, EncoderError):
                raise result
            rows.append(torch.frombuffer(bytearray(result.data), dtype=torch.float32).view(result.shape))
        return torch.cat(rows)


def least_cosines(before: Tensor, after: Tensor, parts: int) -> Tensor:
    """Of each row `(rows, parts * columns)`, the least cosine similarity of its parts; `(rows,)` in float64.

    Two parts of zeros are the same, one of them is as far from the other as can be.
    """
    one, other = (rows.double().view(len(rows), parts, -1) for rows in (before, after))
    lengths = one.norm(dim=2) * other.norm(dim=2)
    cosines = (one * other).sum(2) / lengths
    same = (one == other).all(2)
    return torch.where(lengths == 0, same.double(), cosines).amin(1)


def norm_errors(expected: Tensor, rows: Tensor, parts: int) -> Tensor:
    """Of each row `(rows, parts * columns)`, the largest norm error of its parts; `(rows,)` in float64.

    The error of a part is the norm of its difference over the norm of what was expected: 0 where both are zeros,
    infinite where only the latter is.
    """
    one, other = (each.double().view(len(each), parts, -1) for each in (expected, rows))
    differences, norms = (one - other).norm(dim=2), one.norm(dim=2)
    return torch.where(differences == 0, differences, differences / norms).amax(1)
