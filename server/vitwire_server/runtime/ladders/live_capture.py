"""Capture of further budgets while the engine serves: in parts between batches. Used on the engine thread."""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from vitwire_server.core.budgets import Budget, Ladder
from vitwire_server.core.errors import EncoderError
from vitwire_server.core.items import Item
from vitwire_server.fitting.ladders import REPLAYS
from vitwire_server.runtime.engine import Engine
from vitwire_server.runtime.graphs import GraphSet, Recorder
from vitwire_server.runtime.ladders.calibration import sample_items
from vitwire_server.runtime.memory.streams import Streams
from vitwire_server.towers.tower import Tower


class CaptureFailed(Exception):
    """A budget could not be captured, or not within the memory bound; the others are as before."""


@dataclass(slots=True)
class LiveCapture:
    """Adds graphs to those of an engine, and drops them.

    All graphs share one memory pool, which the largest budget fills: the others are recorded over the same memory, as
    graphs replay one after another. So a change of the ladder needs next to no further memory.
    """

    tower: Tower
    engine: Engine
    graphs: GraphSet
    streams: Streams
    recorder: Recorder
    completed: Callable[[Ladder], Ladder]
    """Adds to a ladder the budgets for short segments that the attention backends call for."""
    memory_bound: int
    """Bytes that the pool may grow by, all captures together."""
    grown: int = 0
    """Bytes that it grew by."""

    def capture(self, budget: Budget) -> Generator[None, None, None]:
        """Capture a budget, in parts that take about as long as a forward each. Raises CaptureFailed."""
        with self._computing(budget):
            graph = self.graphs.warmed_up(budget)
        yield
        before = self._reserved()
        with self._computing(budget):
            self.graphs.add(graph, self.recorder)
        self.grown += self._reserved() - before
        if self.grown > self.memory_bound:
            raise CaptureFailed(f"budget of {budget.tokens} tokens: the graphs take more than --graph-memory")
        yield

    def timed(self, budget: Budget, on: Budget) -> Generator[None, None, float | None]:
        """The device's seconds for a full batch of `budget` on the graph of `on`, a part for each replay.

        On the host nothing is timed and the result is None. Raises CaptureFailed.
        """
        if self.tower.device.type != "cuda":
            return None
        items = sample_items(self.tower, self.tower.samples_for(budget))
        taken = []
        for _ in range(REPLAYS):
            taken.append(self._timed(items, on))
            yield
        return min(taken)

    def keep(self, ladder: Ladder) -> None:
        """Drop the graphs of all other budgets, once nothing runs on them."""
        if self.tower.device.type == "cuda":
            torch.cuda.synchronize(self.tower.device)
        self.graphs.keep(ladder)

    def give_up(self, ladder: Ladder) -> None:
        """Drop the graphs of all other budgets after a failure, and the memory that they alone used."""
        self.keep(ladder)
        before = self._reserved()
        if self.tower.device.type == "cuda":
            torch.cuda.empty_cache()
        self.grown -= before - self._reserved()

    @contextmanager
    def _computing(self, budget: Budget) -> Iterator[None]:
        """Work on the stream of the replays, as it shares their static buffers."""
        try:
            with torch.inference_mode(), self.streams.computing():
                yield
        except RuntimeError as error:  # a lost device shows in the next batch as well
            raise CaptureFailed(f"budget of {budget.tokens} tokens: {str(error).partition(chr(10))[0]}") from error

    def _timed(self, items: Sequence[Item], budget: Budget) -> float:
        collected = self.engine.launch(items, budget).collect()
        failed = next((each for each in collected.results if isinstance(each, EncoderError)), None)
        if failed or collected.ran_separately:
            raise CaptureFailed(f"budget of {budget.tokens} tokens: its replay failed: {failed or 'out of memory'}")
        return collected.timings.execute if collected.timings else 0.0

    def _reserved(self) -> int:
        return torch.cuda.memory_reserved(self.tower.device) if self.tower.device.type == "cuda" else 0
