"""Times of a tower: plain transformers, our engine eagerly, and graphs of just the batches' sizes."""

import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf, isfinite
from typing import NamedTuple

import torch
from bench.models import preprocessing
from bench.stopwatch import Row, Stopwatch
from torch import Tensor

from vitwire_server.core.budgets import Budget, Ladder
from vitwire_server.core.errors import EncoderError
from vitwire_server.core.items import Embedding, Item, total
from vitwire_server.runtime.attention.selection import Selection, select
from vitwire_server.runtime.engine import Engine
from vitwire_server.runtime.graphs import CudaRecorder, GraphSet, Recorder, SimulatedRecorder
from vitwire_server.runtime.memory.streams import TORCH_TYPES, CudaStreams, HostStreams, Streams
from vitwire_server.runtime.staging import Stager
from vitwire_server.towers.tower import Tower

ITEMS, FRAMES = 64, 512
COLUMNS = ("plain_sdpa", "eager", "graph_stock", "graph", "floor", "norm_error")
RIGHT = 0.1
"""Norm error of rows that are the right ones: two images' rows are about 1.4 apart, bfloat16 loses about 0.01."""


@dataclass(frozen=True, slots=True)
class TowerLoad:
    """Images and clips that share a forward."""

    row: Row
    """`tower`, `load` and `COLUMNS`, of which `floor` is known."""
    items: Sequence[Item]
    plain: Callable[[], Tensor]
    """The same forward by plain transformers; returns all rows."""


class Ran(NamedTuple):
    """An engine that was measured."""

    engine: Engine
    ladder: Ladder
    """What it captured."""

    def rows(self, batch: Sequence[Item]) -> Tensor:
        """The rows of a batch, on the host. Raises the failure that stands in the place of an item's."""
        found = []
        for result in self.results(batch):
            if isinstance(result, Exception):
                raise result
            found.append(torch.frombuffer(bytearray(result.data), dtype=TORCH_TYPES[result.dtype]).view(result.shape))
        return torch.cat(found)

    def results(self, batch: Sequence[Item]) -> Sequence[Embedding | EncoderError]:
        """The rows of a batch, or the failures in their place."""
        return self.engine.launch(batch, self.fitting(batch)).collect().results

    def replay(self, batch: Sequence[Item]) -> Callable[[], object] | None:
        """The graph of a batch alone, its inputs being on the device; None without one."""
        if not (fitting := self.fitting(batch)):
            return None
        self.results(batch)
        return torch.inference_mode()(self.engine._graphs[fitting].replay)

    def fitting(self, batch: Sequence[Item]) -> Budget | None:
        return self.ladder.smallest_fitting(total([item.footprint for item in batch]), len(batch))


class TowerTimes:
    """Measures the loads of one tower; our engine is put together as a server does it."""

    def __init__(self, name: str, tower: Tower, stopwatch: Stopwatch, captures: list[Row], seconds: float) -> None:
        """`seconds` of a measurement; each capture is added to `captures`."""
        self._tower, self._name, self._stopwatch, self._captures = tower, name, stopwatch, captures
        self._seconds = seconds
        self._streams: Streams = CudaStreams(tower.device) if tower.device.type == "cuda" else HostStreams()
        self._stager = Stager(tower.geometry, preprocessing(), tower.device)

    def measure(self, loads: Sequence[TowerLoad], attention: str) -> tuple[Ran, str]:
        """Fill the rows; returns the engine with graphs of fused blocks, and what attends.

        `attention` is the server's --attention-backend. A row lacks the times of an engine whose rows are wrong.
        """
        expected = {}
        for load in loads:
            self._timed(load, "plain_sdpa", partial(self._stopwatch.timed, load.plain))
            if load.row["plain_sdpa"]:
                expected[load.row["load"]] = load.plain().float()
        choice = _chosen(self._tower, attention)
        ladder = _ladder(self._tower, [load.items for load in loads], choice)
        for column in ("graph_stock", "eager", "graph"):
            if column == "eager":
                blocks = f"{_fused(self._tower, choice)} of {len(self._tower.blocks)} blocks fused"
                sys.stderr.write(f"{self._name}: {blocks}\n")
            ran = self._measured(column, ladder, loads)
            for load in loads:
                self._check(load, column, ran, expected.get(load.row["load"]))
        return ran, f"{choice.name}, {choice.reason}" if choice else "sdpa, the only one for tiles"

    def _measured(self, column: str, ladder: Ladder, loads: Sequence[TowerLoad]) -> Ran:
        """Eager forwards are launched by an engine without budgets."""
        graphs = self._captured(column, ladder if column != "eager" else Ladder())
        ran = Ran(Engine(self._tower, graphs, self._stager, self._streams), graphs.ladder)
        for load in loads:
            fitting = ran.fitting(load.items)
            if column == "eager" or fitting:
                self._timed(load, column, partial(_execute, ran.engine, load.items, fitting))
            else:
                self._stopwatch.left_out.append(f"{self._name} {load.row['load']} {column}: no graph")
        return ran

    def _timed(self, load: TowerLoad, column: str, once: Callable[[], float]) -> None:
        self._stopwatch.measure(load.row, column, once, self._seconds)

    def _check(self, load: TowerLoad, column: str, ran: Ran, expected: Tensor | None) -> None:
        """Write how far our rows are from those of plain transformers; the times of wrong rows are left out."""
        row = load.row
        if row[column] is None or expected is None:
            return
        error = norm_error(ran.rows(load.items), expected)
        row["norm_error"] = max(round(error, 4), row["norm_error"] or 0.0) if isfinite(error) else None
        if not error < RIGHT:
            row[column] = None
            where = f"{self._name} {row['load']} {column}"
            self._stopwatch.left_out.append(f"{where}: rows differ from those of plain transformers by {error:.2f}")

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


def norm_error(rows: Tensor, expected: Tensor) -> float:
    """How far rows are from those that are expected, relative in norm; infinite if there are more or fewer of them."""
    if rows.shape != expected.shape:
        return inf
    return float((rows.to(expected) - expected).norm() / expected.norm())


def _chosen(tower: Tower, attention: str) -> Selection | None:
    """Attend by the backend that the server chooses for --attention-backend `attention`; None for towers of tiles."""
    if not tower.segmented:
        return None
    own = tower.attention_heads
    choice = select(attention, tower.device, tower.dtype, *own, captured=True, resampler=tower.resampler_heads)
    tower.use_attention(choice.implementation)
    return choice


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
