"""Plans: which items share a forward, and on which budget."""

from dataclasses import dataclass
from enum import StrEnum

from vitwire_server.core.budgets import Budget


class Fallback(StrEnum):
    """Why an item runs eagerly; also the values of a metric's label."""

    OVERSIZE = "oversize"
    TOO_MANY_FRAMES = "too_many_frames"
    CHEAPER_EAGER = "cheaper_eager"
    NOT_CAPTURED = "not_captured"
    GRAPHS_OFF = "graphs_off"
    OUT_OF_MEMORY = "out_of_memory"


@dataclass(frozen=True, slots=True)
class Batch:
    """Items, by position in what was planned, that share one forward."""

    items: tuple[int, ...]
    budget: Budget | None
    """None runs eagerly at the exact shape."""
    fallback: Fallback | None = None
    """Set exactly if `budget` is None."""

    def __post_init__(self) -> None:
        if (self.budget is None) != (self.fallback is not None):
            raise ValueError("a batch has either a budget or the reason for having none")


@dataclass(frozen=True, slots=True)
class Plan:
    """Batches that together hold each planned item exactly once, in the order to run them."""

    batches: tuple[Batch, ...]
