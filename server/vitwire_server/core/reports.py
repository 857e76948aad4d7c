"""Reports on encoded items and their batches."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol

from vitwire_server.core.budgets import Budget
from vitwire_server.core.delivery import Delivered, NotDelivered, Stored
from vitwire_server.core.errors import EncoderError
from vitwire_server.core.grids import Grid
from vitwire_server.core.items import Embedding, Modality
from vitwire_server.core.plans import Fallback
from vitwire_server.core.runner import Timings


class Path(StrEnum):
    """The way an item was encoded."""

    GRAPH = "graph"
    EAGER = "eager"
    CACHE = "cache"


@dataclass(frozen=True, slots=True)
class ItemReport:
    """Report on one encoded item. Times in seconds."""

    path: Path
    fallback: Fallback | None
    budget_tokens: int
    tokens: int
    """Rows returned."""
    queued: float
    encoded: float
    started: float = 0.0
    """When the item's batch started, on the scheduler's clock."""
    timings: Timings | None = None
    """Stages of the item's batch; None if nothing ran."""
    grid: Grid | None = None
    """The grid of rows from the cache, which the request need not name."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """An item's rows and the report on them."""

    embedding: Embedding
    report: ItemReport
    delivery: Delivered | NotDelivered | Stored | None = None
    """Outcome of the delivery; None if the rows are returned and the item has no region."""
    new: tuple[int, int] | None = None
    """First and end of the rows that are to be sent now, of a clip whose rows leave in groups; None for all rows."""

    @property
    def is_partial(self) -> bool:
        """Whether more rows will follow: only these are complete."""
        return self.new is not None and self.new[1] < self.embedding.shape[0]


Outcome = Encoded | EncoderError


@dataclass(frozen=True, slots=True)
class Accepted:
    """An item whose rows are only stored was admitted."""

    grid: Grid
    tokens: int
    forecast: float = 0.0
    """Predicted seconds until its rows are stored."""


@dataclass(frozen=True, slots=True)
class BatchReport:
    """A batch that ran. `items` gives modality and outcome of each item in it."""

    items: Sequence[tuple[Modality, Outcome]]
    requests: int
    """Requests that the items came from."""
    budget: Budget | None
    fallback: Fallback | None
    tokens: int
    """Rows of real items; the budget's other rows are padding."""
    timings: Timings | None
    """None if nothing ran."""


class Waiting(NamedTuple):
    """What waits in the queue."""

    items: int
    nbytes: int
    """Bytes of pixels."""
    tokens: int
    seconds: float
    """Predicted."""


class Monitor(Protocol):
    """Counts the scheduler's events; implemented by the metrics."""

    def batch_ran(self, report: BatchReport) -> None: ...

    def item_waited(self, seconds: float) -> None: ...

    def item_dropped(self, stage: str, reason: str) -> None: ...

    def watch_queue(self, waiting: Callable[[], Waiting]) -> None: ...

    def heartbeat(self) -> None: ...

    def canary_ran(self, *, passed: bool) -> None: ...


class Refit(StrEnum):
    """Outcome of a fit of the ladder to recent loads."""

    SWAPPED = "swapped"
    KEPT = "kept"
    """No other ladder was worth its capture."""
    FAILED = "failed"
    """A budget could not be captured, and the ladder stayed as it was."""


class LadderMonitor(Protocol):
    """Counts changes of the ladder; implemented by the metrics."""

    def refitted(self, result: Refit) -> None: ...

    def changed(self, ladder: Iterable[Budget], pause: float) -> None: ...
