"""What an embedding has to look like, as far as the client can know it before the server answers."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from vitwire._embedding import DType, Report
from vitwire._items import Item
from vitwire._model import Model

_INFINITY: dict[DType, tuple[npt.DTypeLike, npt.DTypeLike, int, int]] = {
    "float32": ("<i4", "<u4", 0x7F80_0000, 0xFF80_0000),
    "float16": ("<i2", "<u2", 0x7C00, 0xFC00),
    "bfloat16": ("<i2", "<u2", 0x7F80, 0xFF80),
}
"""How numpy reads the bits with and without a sign, and those of positive and negative infinity."""


@dataclass(frozen=True, slots=True)
class Expected:
    """Of one item. The defaults expect nothing."""

    grid: tuple[int, int, int] = (0, 0, 0)
    """The item's own."""
    width: int = 0
    """0 where it is not known."""
    rows: int = 0
    """Rows without pruning or pooling; 0 where they are not known, as in towers that take tiles."""
    exact: bool = False
    """Whether there are just so many rows; else there may be fewer."""

    @classmethod
    def of(cls, item: Item, model: Model) -> "Expected":
        video = item.modality == "video"
        settings = model.video_preprocessor if video else model.image_preprocessor
        if settings is None or settings.tiling is not None:
            return cls(item.grid, model.embedding_width)
        t, h, w = item.grid
        rows = t * h * w // model.merge_size**2
        if item.keep_ratio in (0.0, 1.0):
            return cls(item.grid, model.embedding_width, rows, exact=not video or t == 1)
        ratio = float(str(np.float32(item.keep_ratio)))  # as it travels, rounded as the server does
        return cls(item.grid, model.embedding_width, max(rows // t, int(rows * ratio)), exact=True)

    def shape_problem(self, shape: tuple[int, ...]) -> str | None:
        """What is wrong about the shape of a whole embedding."""
        if self.width and shape[-1] != self.width:
            return f"rows of width {shape[-1]} where the model's are {self.width} wide"
        if self.rows and (shape[0] != self.rows if self.exact else not 0 < shape[0] <= self.rows):
            return f"{shape[0]} rows where the grid gives {'' if self.exact else 'at most '}{self.rows}"
        return None


def report_problem(report: Report, rows: int) -> str | None:
    """What is wrong about a report beside so many rows."""
    if report.tokens and report.tokens != rows:
        return f"{rows} rows with a report of {report.tokens} tokens"
    kept = report.kept
    if kept and (len(kept) != rows or any(after <= before for before, after in pairwise(kept))):
        return f"{rows} rows with {len(kept)} kept tokens, which are to be as many and in ascending order"
    return None


def is_finite(rows: npt.NDArray[np.generic], dtype: DType) -> bool:
    """Whether no value is NaN or infinite.

    The bits of all such values are the largest of their sign when read as integers, so that two maxima find them,
    without temporaries: 0.08 ms for 2 MiB of bfloat16, a third of what a mask takes and less than copying it.
    """
    if not rows.size:
        return True
    signed, unsigned, positive, negative = _INFINITY[dtype]
    return bool(rows.view(signed).max() < positive and rows.view(unsigned).max() < negative)
