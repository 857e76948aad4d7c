"""Capture of further budgets on another thread while the engine serves. Used on the engine thread."""

import logging
import sys
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from vitwire_server.core.budgets import Budget, Ladder
from vitwire_server.runtime.engine import Engine
from vitwire_server.runtime.graphs import Graph, GraphSet, Recorder
from vitwire_server.runtime.memory.streams import Streams
from vitwire_server.runtime.recording import is_recording
from vitwire_server.towers.tower import Tower

_log = logging.getLogger(__name__)
_SOME = 64
_SWITCH_SECONDS = 0.00005
"""After which a capture or a fit gives up the interpreter, when the engine thread waits for it."""


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
    _needs_warm_up: bool = False
    _begun: bool = False
    """Whether the other thread is ready to capture."""
    _worker: Executor = field(default_factory=lambda: ThreadPoolExecutor(1, "capturing"))

    def capture(self, budget: Budget) -> Generator[float, None, None]:
        """Capture a budget on another thread. Yields until it is done, at last its seconds. Raises CaptureFailed.

        The forward is recorded without running it, so it takes nothing of the device. Kernels that cannot be loaded
        meanwhile need an eager forward first; all later captures begin with one, then.
        """
        recorded = None
        if not self._needs_warm_up:
            try:
                recorded = yield from self._recorded(budget)
            except CaptureFailed as error:
                _log.info("another attempt after an eager forward: %s", error)
        if recorded is None:
            with self._computing(budget):
                self.graphs.reserved(budget).warm_up()
            yield 0.0
            recorded = yield from self._recorded(budget)
            self._needs_warm_up = True
        graph, seconds = recorded
        if self.grown > self.memory_bound:
            raise CaptureFailed(f"budget of {budget.tokens} tokens: the graphs take more than --graph-memory")
        self.graphs.add(graph)
        yield seconds

    @property
    def times(self) -> bool:
        """Whether graphs can be timed: not on the host, where a replay is a forward."""
        return self.tower.device.type == "cuda"

    def timed(self, budget: Budget, on: Budget) -> float:
        """The device's seconds for a full batch of `budget` on the graph of `on`, which it waits for.

        Raises CaptureFailed.
        """
        with self._computing(on):
            return self.graphs[on].timed(self.tower.samples_for(budget))

    def keep(self, ladder: Ladder) -> None:
        """Drop the graphs of all other budgets, once nothing runs on them; they are freed on the other thread."""
        if self.tower.device.type == "cuda":
            torch.cuda.synchronize(self.tower.device)
        self._worker.submit(self.graphs.keep(ladder).clear)

    def give_up(self, ladder: Ladder) -> None:
        """Drop the graphs of all other budgets after a failure, and the memory that they alone used."""
        self.keep(ladder)
        self._worker.submit(self._free)

    def _recorded(self, budget: Budget) -> Generator[float, None, tuple[Graph, float]]:
        recording = self._worker.submit(self._record, budget)
        while not recording.done():
            yield 0.0
        try:
            return recording.result()
        except CaptureFailed:
            raise
        except Exception as error:  # of a compiler, say: it must not end the engine
            raise CaptureFailed(f"budget of {budget.tokens} tokens: {error!r}") from error

    def _record(self, budget: Budget) -> tuple[Graph, float]:
        """A captured graph, and the seconds that it took. Raises CaptureFailed."""
        start = time.perf_counter()
        before = self.recorder.nbytes
        with self._failing(budget), torch.inference_mode():
            if not self._begun:
                _begin(self.tower)
                self._begun = True
            graph = self.graphs.reserved(budget)
            if self.tower.device.type == "cuda":
                torch.cuda.current_stream(self.tower.device).synchronize()  # metadata is written on another stream
            with self.engine.capturing, self._pausing(), yielding():
                graph.capture(self.recorder)
        self.grown += self.recorder.nbytes - before
        return graph, time.perf_counter() - start

    @contextmanager
    def _pausing(self) -> Iterator[None]:
        """Before each layer, let a launch that is under way end: it needs the interpreter as well."""

        def pause(*_: object) -> None:
            if is_recording():
                with self.engine.launching:
                    pass

        hooks = [block.register_forward_pre_hook(pause) for block in self.tower.blocks]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _free(self) -> None:
        before = self.recorder.nbytes
        if self.tower.device.type == "cuda":
            torch.cuda.empty_cache()
        self.grown -= before - self.recorder.nbytes

    @contextmanager
    def _computing(self, budget: Budget) -> Iterator[None]:
        """Work on the stream of the replays, as it shares their static buffers."""
        with self._failing(budget), torch.inference_mode(), self.streams.computing():
            yield

    @contextmanager
    def _failing(self, budget: Budget) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # a lost device shows in the next batch as well
            raise CaptureFailed(f"budget of {budget.tokens} tokens: {str(error).partition(chr(10))[0]}") from error


@contextmanager
def yielding() -> Iterator[None]:
    """The engine thread waits less for the interpreter, which each of the dozens of operations of a launch gives up.

    Used by one thread at a time.
    """
    interval = sys.getswitchinterval()
    sys.setswitchinterval(min(interval, _SWITCH_SECONDS))
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


def _begin(tower: Tower) -> None:
    """Begin a thread that captures: the handles of libraries cannot be made during a capture."""
    if tower.device.type == "cuda":
        torch.cuda.set_device(tower.device)
        some = torch.ones(_SOME, _SOME, dtype=tower.dtype, device=tower.device)
        torch.addmm(some[0], some, some)
        torch.cuda.current_stream(tower.device).synchronize()
