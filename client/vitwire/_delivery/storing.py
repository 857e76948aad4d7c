"""Results of items whose rows are only stored in the server's cache."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vitwire._delivery.expected import Expected, grid_of, report_problem
from vitwire.embeddings import DTYPES, DType, Report
from vitwire.errors import InvalidItem, Violation
from vitwire.items import Item, numbered
from vitwire.v1 import encoder_pb2 as pb


@dataclass(frozen=True, slots=True)
class Accepted:
    """The server admitted an item: requests for its `content_id` wait for it from now on."""

    grid: tuple[int, int, int]
    """Grid of the item; the server chose that of a file."""
    tokens: int
    """Rows that the embedding will have."""
    forecast: float
    """Predicted seconds until the rows are stored, once the item's bytes have arrived."""


@dataclass(frozen=True, slots=True)
class Stored:
    """The rows of an item are in the server's cache."""

    shape: tuple[int, int]
    """`(tokens, width)`."""
    dtype: DType
    report: Report
    grid: tuple[int, int, int]


def accepted_of(message: pb.Accepted, expected: Expected) -> Accepted:
    """Raises ValueError for what cannot be."""
    grid = (message.grid.t, message.grid.h, message.grid.w)
    if not all(grid) or (any(expected.grid) and grid != expected.grid):
        raise ValueError(f"the server accepted a grid of {grid}, expected {expected.grid}")
    return Accepted(grid, message.tokens, message.forecast.seconds + message.forecast.nanos / 1e9)


def stored_of(message: pb.EmbeddingStored, report: Report, expected: Expected) -> Stored:
    """Raises ValueError for what cannot be."""
    if message.data_type not in DTYPES or len(message.shape) != 2:
        raise ValueError(f"the server stored rows of type {message.data_type} and shape {list(message.shape)}")
    tokens, width = message.shape
    if problem := expected.shape_problem((tokens, width)) or report_problem(report, tokens):
        raise ValueError(f"the server stored {problem}")
    return Stored((tokens, width), DTYPES[message.data_type], report, grid_of(expected, report))


def storable(items: Sequence[Item]) -> Mapping[int, Item]:
    """The items by position. Raises InvalidItem for one without a content_id, or what is no item."""
    known = numbered(items)
    for index, item in known.items():
        if not item.content_id:
            text = "is missing: the rows of an item that is stored are cached under it"
            violation = Violation(f"items[{index}].content_id", text)
            raise InvalidItem(f"{violation.field}: {text}", violations=[violation], item=index)
    return known
