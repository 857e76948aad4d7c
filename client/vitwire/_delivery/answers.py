"""What the server answers to each item of a request: an embedding, an error, or that its rows are stored."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vitwire._delivery.expected import Expected, grid_of, report_problem
from vitwire.embeddings import DTYPES, DType, Embedding, Report
from vitwire.errors import InvalidItem, NotCached, Violation, VitwireError
from vitwire.items import Item, numbered
from vitwire.v1 import encoder_pb2 as pb
from vitwire.wire import Frame, Malformed


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


Result = tuple[int, Embedding | VitwireError]
Answer = tuple[int, Embedding | Accepted | Stored | VitwireError]
Storing = tuple[int, Accepted | Stored | VitwireError]
"""Of items whose rows are only stored: `Accepted`, perhaps several times, and then `Stored` or an error."""
Response = Frame[pb.EncodeResponse] | Frame[pb.EncodeStreamResponse] | Malformed


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


def needs_upload(result: Embedding | VitwireError, item: Item) -> bool:
    """Whether an item that was looked up without its pixels must be sent with them."""
    return isinstance(result, NotCached) and (item.pixels is not None or item.encoded is not None)


def embeddings(results: Mapping[int, Embedding | VitwireError]) -> list[Embedding]:
    """The results in order. Raises the error of the first item that has one."""
    ordered: list[Embedding] = []
    for _, result in sorted(results.items()):
        if isinstance(result, VitwireError):
            raise result
        ordered.append(result)
    return ordered


def stored(answers: Mapping[int, Accepted | Stored | VitwireError]) -> list[Stored]:
    """The last answers to items in order. Raises the error of the first item that has one."""
    ordered: list[Stored] = []
    for _, answer in sorted(answers.items()):
        if isinstance(answer, VitwireError):
            raise answer
        assert isinstance(answer, Stored), "it follows Accepted"
        ordered.append(answer)
    return ordered
