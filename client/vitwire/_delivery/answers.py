"""The server's answers to the items of a request, checked against what item and model lead to expect."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from vitwire.embeddings import DTYPES, DType, Embedding, Report
from vitwire.errors import InvalidItem, NotCached, Violation, VitwireError
from vitwire.items import Item, numbered
from vitwire.model import Model
from vitwire.v1 import encoder_pb2 as pb
from vitwire.wire import Frame, Malformed

T = TypeVar("T")

_INFINITY: dict[DType, tuple[npt.DTypeLike, npt.DTypeLike, int, int]] = {
    "float32": ("<i4", "<u4", 0x7F80_0000, 0xFF80_0000),
    "float16": ("<i2", "<u2", 0x7C00, 0xFC00),
    "bfloat16": ("<i2", "<u2", 0x7F80, 0xFF80),
}
"""Signed and unsigned integer dtypes of each type, and the bits of positive and negative infinity."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """The server admitted an item: requests for its `content_id` wait for it from now on."""

    grid: tuple[int, int, int]
    """Grid of the item; the server chose that of a file."""
    tokens: int
    """Rows that the embedding will have."""
    forecast: float
    """Predicted seconds until the rows are stored, once the item's bytes have arrived."""
    frame_seconds: tuple[float, ...] = ()
    """Seconds of each frame that is used of an encoded clip: its index ÷ the clip's mean frame rate."""
    second_per_grid: float = 0.0
    """Seconds of an encoded clip for each of the `t` groups of frames in its grid; 0 if unknown."""


@dataclass(frozen=True, slots=True)
class Stored:
    """The rows of an item are in the server's cache."""

    shape: tuple[int, int]
    """`(tokens, width)`."""
    dtype: DType
    report: Report
    grid: tuple[int, int, int]


Result = tuple[int, Embedding | VitwireError]
Outcome = Embedding | Accepted | Stored | VitwireError
Answer = tuple[int, Outcome]
Storing = tuple[int, Accepted | Stored | VitwireError]
"""Answers to items whose rows are only stored: `Accepted`, perhaps several times, and then `Stored` or an error."""
Response = Frame[pb.EncodeResponse] | Frame[pb.EncodeStreamResponse] | Malformed


@dataclass(frozen=True, slots=True)
class Expected:
    """The expected embedding of one item. The defaults accept any."""

    grid: tuple[int, int, int] = (0, 0, 0)
    width: int = 0
    """0 if unknown."""
    rows: int = 0
    """Rows without pruning or pooling over frames; 0 if unknown, as for tile towers that do not pool."""
    exact: bool = False
    """Whether exactly `rows` are expected; else fewer are accepted."""

    @classmethod
    def of(cls, item: Item, model: Model) -> "Expected":
        video = item.modality == "video"
        if model.pooling != "none" and any(item.grid):
            return cls(item.grid, model.embedding_width, item.grid[0], exact=True)
        if not any(item.grid) or item.modality not in model.rows_by_grid:
            return cls(item.grid, model.embedding_width)
        t, h, w = item.grid
        rows = t * h * w // model.merge_size**2
        if item.keep_ratio in (0.0, 1.0):
            return cls(item.grid, model.embedding_width, rows, exact=not video or t == 1)
        ratio = float(str(np.float32(item.keep_ratio)))  # as float32, rounded as on the server
        return cls(item.grid, model.embedding_width, max(rows // t, int(rows * ratio)), exact=True)

    def shape_problem(self, shape: tuple[int, ...]) -> str | None:
        """The problem with the shape of an embedding; None if it is as expected."""
        if self.width and shape[-1] != self.width:
            return f"rows of width {shape[-1]}, expected {self.width}"
        if self.rows and (shape[0] != self.rows if self.exact else not 0 < shape[0] <= self.rows):
            return f"{shape[0]} rows, expected {'' if self.exact else 'at most '}{self.rows} from the grid"
        return None


def grid_of(expected: Expected, report: Report) -> tuple[int, int, int]:
    """The grid of an embedding: the item's, or that in the report if the item has none."""
    return expected.grid if any(expected.grid) else report.grid


def report_problem(report: Report, rows: int) -> str | None:
    """The problem with the report of an embedding of `rows`; None if they are consistent."""
    if report.tokens and report.tokens != rows:
        return f"{rows} rows with a report of {report.tokens} tokens"
    kept = report.kept
    if kept and (len(kept) != rows or any(after <= before for before, after in pairwise(kept))):
        return f"{rows} rows with {len(kept)} kept tokens, expected as many in ascending order"
    return None


def is_finite(rows: npt.NDArray[np.generic], dtype: DType) -> bool:
    """Whether no value is NaN or infinite.

    Read as integers, their bits are the largest of their sign, so two maxima find them without temporaries: 0.08 ms
    for 2 MiB of bfloat16, a third of the time of a mask.
    """
    if not rows.size:
        return True
    signed, unsigned, positive, negative = _INFINITY[dtype]
    return bool(rows.view(signed).max() < positive and rows.view(unsigned).max() < negative)


def accepted_of(message: pb.Accepted, expected: Expected) -> Accepted:
    """Raises ValueError for what cannot be."""
    grid = (message.grid.t, message.grid.h, message.grid.w)
    if not all(grid) or (any(expected.grid) and grid != expected.grid):
        raise ValueError(f"the server accepted a grid of {grid}, expected {expected.grid}")
    forecast = message.forecast.seconds + message.forecast.nanos / 1e9
    return Accepted(grid, message.tokens, forecast, tuple(message.frame_seconds), message.second_per_grid)


def stored_of(message: pb.EmbeddingStored, report: Report, expected: Expected) -> Stored:
    """Raises ValueError for what cannot be."""
    if message.data_type not in DTYPES or len(message.shape) != 2:
        raise ValueError(f"the server stored an embedding of type {message.data_type} and shape {list(message.shape)}")
    tokens, width = message.shape
    if problem := expected.shape_problem((tokens, width)) or report_problem(report, tokens):
        raise ValueError(f"the server stored {problem}")
    return Stored((tokens, width), DTYPES[message.data_type], report, grid_of(expected, report))


def storable(items: Sequence[Item]) -> Mapping[int, Item]:
    """The items by position. Raises InvalidItem for one without a content_id, or what is no item."""
    known = numbered(items)
    for index, item in known.items():
        if not item.content_id:
            text = "is missing: the embedding of a stored item is cached under it"
            violation = Violation(f"items[{index}].content_id", text)
            raise InvalidItem(f"{violation.field}: {text}", violations=[violation], item=index)
    return known


def needs_upload(result: Embedding | VitwireError, item: Item) -> bool:
    """Whether an item that was looked up without its pixels must be sent with them."""
    return isinstance(result, NotCached) and (item.pixels is not None or item.encoded is not None)


def in_order(answers: Mapping[int, T | VitwireError]) -> list[T]:
    """The last answer to each item, in order. Raises the error of the first item that has one."""
    ordered: list[T] = []
    for _, answer in sorted(answers.items()):
        if isinstance(answer, VitwireError):
            raise answer
        ordered.append(answer)
    return ordered
