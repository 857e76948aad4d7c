"""Capture of further budgets while the engine serves, in turns between batches. Used on the engine thread.

A forward is captured on a second thread, which waits before a layer once its turn is over: the engine's thread gets to
batches every few milliseconds, however long the forward takes. No graph is open meanwhile, as a capture ends with each
turn and continues as another slice.
"""

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch

from vitwire_server.core.budgets import Budget, Ladder
from vitwire_server.fitting.ladders import REPLAYS
from vitwire_server.runtime.graphs import GraphSet, Recorder
from vitwire_server.runtime.memory.streams import Streams
from vitwire_server.runtime.recording import join
from vitwire_server.runtime.turns import Turns
from vitwire_server.towers.tower import Tower

TURN_SECONDS = 0.003
"""Time of a turn, after which the engine's thread gets to batches."""
LONGEST_REPLAY = 0.006
"""Seconds of a replay that is timed, at most."""


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
    turns: Turns = field(default_factory=Turns)

    def capture(self, budget: Budget, seconds: float) -> Generator[None, None, None]:
        """Capture a budget, a turn for each part; its forward takes these seconds of the device. Raises CaptureFailed.

        A turn takes `TURN_SECONDS` of the host and of the device, and at most a layer longer.
        """
        blocks = self.tower.blocks
        share = TURN_SECONDS / seconds if seconds else 1.0  # 0 if no eager forward had room when costs were measured
        work = _Work(self, max(1, int(len(blocks) * share)))
        hooks = [block.register_forward_pre_hook(work.before_layer) for block in blocks]
        try:
            yield from self.turns.of(partial(work.capture, budget), TURN_SECONDS)
        except CaptureFailed:
            raise
        except Exception as error:  # of a compiler, say: it must not end the engine
            raise CaptureFailed(f"budget of {budget.tokens} tokens: {error!r}") from error
        finally:
            for hook in hooks:
                hook.remove()
            self.grown += work.grown
        if self.grown > self.memory_bound:
            raise CaptureFailed(f"budget of {budget.tokens} tokens: the graphs take more than --graph-memory")
        yield

    def timed(self, budget: Budget, on: Budget, seconds: float) -> Generator[None, None, float | None]:
        """The device's seconds for the replay of `on` with a full batch of `budget`; a part begins one at most.

        None if it is predicted to take more than `LONGEST_REPLAY`, as batches would wait for it, and on the host.
        Raises CaptureFailed.
        """
        if self.tower.device.type != "cuda" or seconds > LONGEST_REPLAY:
            return None
        graph, taken = self.graphs[on], list[float]()
        for _ in range(REPLAYS):
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            with self.computing(budget):
                graph.load_samples(budget)
                began.record()
                graph.replay()
                ended.record()
            yield  # batches are launched behind it
            ended.synchronize()
            taken.append(began.elapsed_time(ended) / 1e3)
        return min(taken)

    def keep(self, ladder: Ladder) -> Generator[None, None, None]:
        """Drop the graphs of all other budgets, a part for each. Nothing runs on them any more."""
        for budget in set(self.graphs.ladder) - set(ladder):
            self.graphs.drop(budget)
            yield

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
    def computing(self, budget: Budget) -> Iterator[None]:
        """Work on the stream of the replays, as it shares their static buffers."""
        try:
            with torch.inference_mode(), self.streams.computing():
                yield
        except (RuntimeError, ValueError) as error:  # a lost device shows in the next batch as well
            raise CaptureFailed(f"budget of {budget.tokens} tokens: {str(error).partition(chr(10))[0]}") from error

    def reserved(self) -> int:
        return torch.cuda.memory_reserved(self.tower.device) if self.tower.device.type == "cuda" else 0


@dataclass(slots=True)
class _Work:
    """The capture of a budget, on the second thread."""

    live: LiveCapture
    most: int
    """Layers of an eager forward in a turn."""
    layers: int = 0
    """Of this turn."""
    captures: bool = False
    """Not the eager forward any more."""
    grown: int = 0
    """Bytes that the pool grew by."""

    def capture(self, budget: Budget) -> None:
        """Raises CaptureFailed."""
        live = self.live
        with live.computing(budget):
            graph = live.graphs.warmed_up(budget)
            self._wait()
            self.captures = True
            with self._growing(1):
                live.graphs.add(graph, live.recorder, self._beside)

    def before_layer(self, *_: object) -> None:
        """Wait for the next turn if this one is over."""
        if not self.live.turns.is_mine():
            return
        self.layers += 1
        if not self.captures:
            if self.layers > self.most or self.live.turns.is_over():
                self._wait()
        elif self.live.turns.is_over():
            with self.live.recorder.interrupted():
                self._pause()

    def _pause(self) -> None:
        """Let batches run, whose memory does not count."""
        with self._growing(-1):
            self._wait()

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """Let batches run meanwhile, whose memory does not count."""
        with self._growing(-1), self.live.turns.beside():
            yield

    @contextmanager
    def _growing(self, sign: int) -> Iterator[None]:
        """Count what the pool grows by within this context, with this sign."""
        self.grown -= sign * self.live.reserved()
        try:
            yield
        finally:
            self.grown += sign * self.live.reserved()

    def _wait(self) -> None:
        join()  # batches use the same memory
        self.live.turns.wait()
        self.layers = 1
