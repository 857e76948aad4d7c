"""A server whose tower costs nothing: `python bench/noop_server.py serve …`. What remains is the cost of the service.

The rows it answers with are allocated and written once, where a device would write them: in the memory that the
processes of a server share, if there are several. Part of no package, like `tests/support/faulty_server.py`.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from vitwire_server import __main__
from vitwire_server.assembling import loading
from vitwire_server.core.budgets import Budget
from vitwire_server.core.items import Embedding, Item
from vitwire_server.core.runner import Collected, Running, Timings
from vitwire_server.runtime.engine import Engine

MOST_ROWS = 1280
"""Those of the largest image of bench/sizes.py."""


@dataclass(frozen=True, slots=True)
class Done:
    """A batch whose rows have been there from the start."""

    results: Sequence[Embedding]

    def collect(self) -> Collected:
        """The rows, after no time."""
        return Collected(self.results, Timings(0.0, 0.0, 0.0))


class NoopEngine(Engine):
    """Answers every item of up to `MOST_ROWS` rows with the same memory."""

    def launch(self, items: Sequence[Item], budget: Budget | None) -> Running:  # noqa: ARG002
        return Done([self._embedding(item) for item in items])

    def _embedding(self, item: Item) -> Embedding:
        width = self._tower.geometry.width
        return Embedding(self._prebuilt[: item.rows * width * item.output.size], item.output, (item.rows, width))

    @cached_property
    def _prebuilt(self) -> memoryview:
        most = MOST_ROWS * self._tower.geometry.width * self._tower.dtype.itemsize
        rows = torch.ones(most // 2, dtype=torch.bfloat16)
        return self._streams.download([rows], []).rows[0]  # the rows themselves, with one process


if __name__ == "__main__":
    setattr(loading, "Engine", NoopEngine)  # noqa: B010 - a name that it imports
    __main__.main(sys.argv[1:])
