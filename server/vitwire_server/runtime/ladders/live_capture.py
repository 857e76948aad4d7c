"""Capture of further budgets while the engine serves, each whole, between two batches. Used on the engine thread."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from vitwire_server.core.budgets import Budget, Ladder
from vitwire_server.fitting.ladders import REPLAYS
from vitwire_server.runtime.graphs import GraphSet, Recorder
from vitwire_server.runtime.memory.streams import Streams
from vitwire_server.towers.tower import Tower

LONGEST_REPLAY = 0.006
"""Seconds of a replay that is timed, at most: batches wait for it."""


class CaptureFailed(Exception):
    """A budget could not be captured, or not within the memory bound; the others are as before."""


@dataclass(slots=True)
class LiveCapture:
    """Adds graphs to those of an engine, and drops them.

    All graphs share one memory pool, which the largest budget fills: the others are recorded over the same memory, as
    graphs replay one after another. So a change of the ladder needs next to no further memory.
    """

    tower: Tower
    graphs: GraphSet
    streams: Streams
    recorder: Recorder
    completed: Callable[[Ladder], Ladder]
    """Adds to a ladder the budgets for short segments that the attention backends call for."""
    memory_bound: int
    """Bytes that the pool may grow by, all captures together."""
    grown: int = 0
    """Bytes that it grew by."""

    def capture(self, budget: Budget) -> None:
        """Capture a budget. Raises CaptureFailed."""
        with self._computing(budget):
            graph = self.graphs.warmed_up(budget)
            before = self.reserved()
            try:
                self.graphs.add(graph, self.recorder)
            finally:
                self.grown += self.reserved() - before
        if self.grown > self.memory_bound:
            raise CaptureFailed(f"budget of {budget.tokens} tokens: the graphs take more than --graph-memory")

    def timed(self, budget: Budget, on: Budget, predicted: float) -> float | None:
        """The device's seconds for the replay of `on` with a full batch of `budget`.

        None on the host, and if the replay is predicted to take more than `LONGEST_REPLAY` seconds. Raises
        CaptureFailed.
        """
        if self.tower.device.type != "cuda" or predicted > LONGEST_REPLAY:
            return None
        graph, taken = self.graphs[on], list[float]()
        with self._computing(budget):
            for _ in range(REPLAYS):
                began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                graph.load_samples(budget)
                began.record()
                graph.replay()
                ended.record()
                ended.synchronize()
                taken.append(began.elapsed_time(ended) / 1e3)
        return min(taken)

    def give_up(self, ladder: Ladder) -> None:
        """Drop the graphs of all other budgets after a failure, and the memory that they alone used."""
        self._release()  # what batches have freed must not count as the graphs'
        before = self.reserved()
        self.graphs.keep(ladder)
        self._release()
        self.grown = max(0, self.grown - (before - self.reserved()))

    def _release(self) -> None:
        """Return memory that nothing uses to the device."""
        if self.tower.device.type == "cuda":
            torch.cuda.empty_cache()

    @contextmanager
    def _computing(self, budget: Budget) -> Iterator[None]:
        """Work on the stream of the replays, as it shares their static buffers."""
        try:
            with torch.inference_mode(), self.streams.computing():
                yield
        except Exception as error:  # of a compiler, say: it must not end the engine; a lost device ends the next batch
            raise CaptureFailed(f"budget of {budget.tokens} tokens: {str(error).partition(chr(10))[0]}") from error

    def reserved(self) -> int:
        """Bytes that torch holds on the device."""
        return torch.cuda.memory_reserved(self.tower.device) if self.tower.device.type == "cuda" else 0
