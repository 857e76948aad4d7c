"""Times of our engine: eager forwards, and graphs of just the batches' sizes."""

import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from bench.models import preprocessing
from bench.stopwatch import Row, Stopwatch

from vitwire_server.core.budgets import Budget, Ladder
from vitwire_server.core.errors import EncoderError
from vitwire_server.core.items import Embedding, Item, total
from vitwire_server.core.plans import Batch, Fallback
from vitwire_server.runtime.attention.selection import Selection
from vitwire_server.runtime.engine import Engine
from vitwire_server.runtime.graphs import CudaRecorder, GraphSet, Recorder, SimulatedRecorder
from vitwire_server.runtime.memory.streams import CudaStreams, HostStreams, Streams
from vitwire_server.runtime.staging import Stager
from vitwire_server.towers.tower import Tower

ITEMS, FRAMES = 64, 512
Batches = Mapping[str, Sequence[Item]]
"""By load."""


class Ran(NamedTuple):
    """An engine that was measured."""

    engine: Engine
    ladder: Ladder
    """What it captured."""

    def results(self, batch: Sequence[Item]) -> Sequence[Embedding | EncoderError]:
        """The rows of a batch, or the failures in their place."""
        return self.engine.launch(batch, self._fitting(batch)).collect().results

    def plan(self, items: Sequence[Item]) -> list[Batch]:
        """All items in one batch, whose graph is the smallest that fits."""
        fitting = self._fitting(items)
        return [Batch(tuple(range(len(items))), fitting, None if fitting else Fallback.NOT_CAPTURED)]

    def replay(self, batch: Sequence[Item]) -> Callable[[], object] | None:
        """The graph of a batch alone, its inputs being on the device; None without one."""
        if not (fitting := self._fitting(batch)):
            return None
        self.results(batch)
        return torch.inference_mode()(self.engine._graphs[fitting].replay)

    def _fitting(self, batch: Sequence[Item]) -> Budget | None:
        return self.ladder.smallest_fitting(total([item.footprint for item in batch]), len(batch))


class EngineTimes:
    """Measures batches on one tower, by the engine as a server puts it together."""

    def __init__(self, tower: Tower, name: str, stopwatch: Stopwatch, captures: list[Row], seconds: float) -> None:
        """`seconds` of a measurement; each capture is added to `captures`."""
        self._tower, self._name, self._stopwatch, self._captures = tower, name, stopwatch, captures
        self._seconds = seconds
        self._streams: Streams = CudaStreams(tower.device) if tower.device.type == "cuda" else HostStreams()
        self._stager = Stager(tower.geometry, preprocessing(), tower.device)

    def measured(
        self, batches: Batches, rows: Mapping[str, Row], choice: Selection | None
    ) -> Iterator[tuple[str, Ran]]:
        """Fill columns of the rows, and yield each with its engine: graphs of stock blocks, then fused, and eagerly.

        `choice` is None for towers of tiles.
        """
        ladder = _ladder(self._tower, batches.values(), choice)
        for column in ("graph_stock", "eager", "graph"):
            if column == "eager":
                blocks = f"{_fused(self._tower, choice)} of {len(self._tower.blocks)} blocks fused"
                sys.stderr.write(f"{self._name}: {blocks}\n")
            yield column, self._measure(column, ladder, batches, rows)

    def _measure(self, column: str, ladder: Ladder, batches: Batches, rows: Mapping[str, Row]) -> Ran:
        """Eager forwards are launched by an engine without budgets."""
        graphs = self._captured(column, ladder if column != "eager" else Ladder())
        engine = Engine(self._tower, graphs, self._stager, self._streams)
        for load, batch in batches.items():
            fitting = graphs.ladder.smallest_fitting(total([item.footprint for item in batch]), len(batch))
            if column == "eager" or fitting:
                once = partial(_execute, engine, batch, fitting)
                self._stopwatch.measure(rows[load], column, once, self._seconds)
            else:
                self._stopwatch.left_out.append(f"{self._name} {load} {column}: no graph")
        return Ran(engine, graphs.ladder)

    def _captured(self, column: str, ladder: Ladder) -> GraphSet:
        streams = self._streams
        recorder: Recorder = CudaRecorder(streams.compute) if isinstance(streams, CudaStreams) else SimulatedRecorder()
        graphs = GraphSet(self._tower, ladder, recorder, lambda budgets: self._watched(column, budgets))
        self._stopwatch.left_out += [
            f"{self._name} {each.tokens} tokens {column}: {why}" for each, why in graphs.dropped.items()
        ]
        return graphs

    def _watched(self, column: str, budgets: Iterable[Budget]) -> Iterator[Budget]:
        """Seconds and memory of each capture, until the time is up."""
        for each in budgets:
            if self._stopwatch.is_over:
                self._stopwatch.left_out.append(f"{self._name} {each.tokens} tokens {column}: no time to capture")
                continue
            start, before = time.perf_counter(), self._reserved()
            yield each
            took = {"seconds": round(time.perf_counter() - start, 3), "megabytes": None}
            if self._tower.device.type == "cuda":
                took["megabytes"] = round((self._reserved() - before) / 1e6, 1)
            self._captures.append({"tower": self._name, "column": column, "budget": each.tokens, **took})

    def _reserved(self) -> int:
        return torch.cuda.memory_reserved(self._tower.device) if self._tower.device.type == "cuda" else 0


def _ladder(tower: Tower, batches: Collection[Sequence[Item]], choice: Selection | None) -> Ladder:
    """A budget as the server makes it for each batch, with slots for all of the batch's segments."""
    budgets: dict[int, Budget] = {}
    for batch in batches:
        load = total([item.footprint for item in batch])
        own = tower.budget(load.tokens, max_items=ITEMS, max_frames=FRAMES)
        before = budgets.get(load.tokens, own)
        budgets[load.tokens] = replace(
            own,
            max_items=max(before.max_items, len(batch)),
            max_segments=max(before.max_segments, load.segments),
        )
    ladder = Ladder(tuple(sorted(budgets.values())))
    if choice:
        ladder = choice.completed(ladder, merge=tower.geometry.merge)
    loads = [(total([item.footprint for item in batch]), len(batch)) for batch in batches]
    return Ladder(tuple(sorted({fitting for load in loads if (fitting := ladder.smallest_fitting(*load))})))


def _fused(tower: Tower, choice: Selection | None) -> int:
    """Exchange modules and fuse blocks as at load on CUDA; how many blocks. `choice` is None for towers of tiles."""
    tower.rewrite()
    if tower.device.type != "cuda":
        return 0
    from vitwire_server.runtime.fused.fusing import fuse_tower  # noqa: PLC0415 - triton

    return fuse_tower(tower, choice)


def _execute(engine: Engine, batch: Sequence[Item], fitting: Budget | None) -> float:
    """Seconds on the device, as the server reports them: staging, metadata, forward, copies of the rows."""
    collected = engine.launch(batch, fitting).collect()
    failure = next((result for result in collected.results if isinstance(result, Exception)), None)
    if failure or not collected.timings:
        raise failure or RuntimeError("nothing ran")
    return collected.timings.execute
