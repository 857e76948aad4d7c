"""Budget graphs: forwards recorded over static buffers, one per budget. Used on the engine thread.

A *simulated* graph calls the function that a CUDA graph would replay, on the same static buffers. Padding, packing
and buffer reuse are then the same as on a GPU and can be tested on any machine.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from vitwire_server.core.budgets import Budget, Ladder
from vitwire_server.core.grids import Grid
from vitwire_server.core.items import total
from vitwire_server.runtime.graph_recording import captured, join, recording
from vitwire_server.towers.tower import Metadata, Tower

_log = logging.getLogger(__name__)
_WARM_UPS = 3

Fill = Callable[[Tensor, Tensor | None], None]
"""Writes the pixels of a batch, and its crops in towers that take them, into the given rows."""


class SimulatedRecorder:
    """As CudaRecorder; a replay calls the recorded function again."""

    def record(self, forward: Callable[[], None]) -> Callable[[], None]:
        return self.capture(forward)

    def capture(self, forward: Callable[[], None]) -> Callable[[], None]:
        with recording():
            forward()
        return forward


class CudaRecorder:
    """CUDA graphs that share a memory pool, captured on the stream they are replayed on."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._pool = torch.cuda.graph_pool_handle()
        self._invalidated: list[torch.cuda.CUDAGraph] = []
        """Kept alive, as torch's host allocator may still query their capture."""

    def record(self, forward: Callable[[], None]) -> Callable[[], None]:
        """Run `forward` at least once and return its replay. Raises RuntimeError."""
        # The inputs of the forward were written on the caller's stream.
        caller = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(caller)
        with recording(tunes=True), torch.cuda.stream(self._stream):
            for _ in range(_WARM_UPS):  # handles, autotuning and lazy set-up must not be captured
                forward()
        torch.cuda.synchronize(self._stream.device)
        torch.cuda.empty_cache()  # what the warm-up used is room for the graph's memory
        return self.capture(forward)

    def capture(self, forward: Callable[[], None]) -> Callable[[], None]:
        """Record a forward that ran before, while batches are in flight; returns its replay. Raises RuntimeError.

        Unlike `torch.cuda.graph`, this neither waits for the device nor frees cached memory, which batches go on using.
        Other threads may use the device meanwhile.
        """
        graph = torch.cuda.CUDAGraph()
        try:
            with recording(), torch.cuda.stream(self._stream), captured(graph, self._pool):
                try:
                    forward()
                finally:
                    join()  # else CUDA's complaint about a second stream would replace an error of the forward
        except RuntimeError:
            self._abandon(graph)
            raise
        return graph.replay

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """Undo the capture in torch's allocator, and use a new pool from now on.

        torch does not end a capture that CUDA invalidated: its allocator would then refuse the pool to later captures
        and hold back all memory shared between streams.
        """
        try:
            torch._C._cuda_endAllocateToPool(self._stream.device_index, self._pool)  # noqa: SLF001 - torch has no other way
        except RuntimeError:
            pass  # already ended, as after running out of memory
        else:
            self._invalidated.append(graph)
        self._pool = torch.cuda.graph_pool_handle()


Recorder: TypeAlias = SimulatedRecorder | CudaRecorder


class InputBuffer:
    """Static input rows shared by all graphs; each graph uses the first rows.

    Rows from `_dirty` on are zero, so only stale rows before it need to be cleared.
    """

    def __init__(self, rows: int, columns: int, tower: Tower) -> None:
        self.tensor = torch.zeros(rows, columns, dtype=tower.dtype, device=tower.device)
        self._dirty = 0

    def take(self, used: int, capacity: int) -> Tensor:
        """The first `used` rows, for the caller to write; the rest up to `capacity` is zeroed as padding.

        Raises ValueError if `used` is more than `capacity`.
        """
        if used > capacity:
            raise ValueError(f"{used} rows of pixels do not fit in a budget of {capacity} rows")
        stale = self._dirty
        self._dirty = used if stale <= capacity else stale
        if used < min(stale, capacity):
            self.tensor[used : min(stale, capacity)].zero_()
        return self.tensor[:used]


class StaticBuffers:
    """Static inputs and output shared by all graphs, sized for the largest budget.

    Graphs replay one after another, so they can share these buffers, which are outside the graphs' memory pool.
    """

    def __init__(self, tower: Tower, budgets: Sequence[Budget]) -> None:
        geometry = tower.geometry
        capacities = [tower.capacity(budget) for budget in budgets]
        self.tokens = max(budget.tokens for budget in budgets)
        self.inputs = InputBuffer(max(capacity.patches for capacity in capacities), geometry.row, tower)
        crops = max(capacity.crops for capacity in capacities)
        self.crops = InputBuffer(crops, geometry.crop_row, tower) if geometry.crop_row else None
        rows = max(tower.rows(capacity) for capacity in capacities)
        self.rows = torch.zeros(rows, geometry.width, dtype=tower.dtype, device=tower.device)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return self.inputs.tensor.nbytes + self.rows.nbytes + (self.crops.tensor.nbytes if self.crops else 0)


class Graph:
    """A recorded forward and its metadata buffers."""

    def __init__(self, tower: Tower, budget: Budget, buffers: StaticBuffers) -> None:
        """Raises RuntimeError."""
        self.budget = budget
        self.metadata = tower.reserve(tower.capacity(budget))
        if buffers.crops:
            self.metadata.crops = buffers.crops.tensor[: self.metadata.capacity.crops]
        self._tower = tower
        self._buffers = buffers
        self._pixels = buffers.inputs.tensor[: self.metadata.capacity.patches]
        self._rows = buffers.rows[: tower.rows(self.metadata.capacity)]
        # Does not refer to this object: memory of a dropped graph must not wait for a garbage collection.
        self._forward = partial(_compute, tower, self._pixels, self.metadata, self._rows)
        self._replay: Callable[[], None] = self._forward

    def record(self, recorder: Recorder) -> None:
        """Warm up and capture the forward on a batch of the budget's size. Raises RuntimeError."""
        self.load_samples(self.budget)
        self._replay = recorder.record(self._forward)

    def warm_up(self) -> None:
        """Run the forward on a batch of the budget's size, before `capture`. Raises RuntimeError."""
        self.load_samples(self.budget)
        with recording():
            self._forward()

    def capture(self, recorder: Recorder) -> None:
        """Capture the forward, which was warmed up, between batches. Raises RuntimeError."""
        self._replay = recorder.capture(self._forward)

    def load(self, grids: Sequence[Grid], fill: Fill) -> None:
        """Write a batch into the static buffers. Raises ValueError if it does not fit."""
        capacity, load = self.metadata.capacity, total([self._tower.footprint(grid) for grid in grids])
        pixels = self._buffers.inputs.take(load.patches, capacity.patches)
        crops = self._buffers.crops.take(load.crops, capacity.crops) if self._buffers.crops else None
        fill(pixels, crops)
        if self.metadata.laid != (laid := tuple(grids)):
            self.metadata.laid = ()
            self._tower.prepare(grids, self.metadata)
            self.metadata.laid = laid

    def replay(self) -> Tensor:
        """Run the recorded forward; returns rows of the static output, valid until the next replay."""
        self._replay()
        return self._rows

    def load_samples(self, budget: Budget) -> None:
        """Write a batch of a budget's size into the static buffers, without pixels."""
        self.load(self._tower.samples_for(budget), _no_pixels)


class GraphSet:
    """The captured graphs by budget, and the errors of budgets that failed. Making it captures them."""

    @torch.inference_mode()
    def __init__(
        self,
        tower: Tower,
        ladder: Ladder,
        recorder: Recorder,
        track: Callable[[Iterable[Budget]], Iterable[Budget]] = lambda budgets: budgets,
    ) -> None:
        """Capture every budget of `ladder`, largest first; budgets that fail are dropped."""
        self.buffers: StaticBuffers | None = None
        self.dropped: dict[Budget, str] = {}
        self._tower = tower
        self._graphs: dict[Budget, Graph] = {}
        for budget in track(sorted(ladder, reverse=True)):
            try:
                self.buffers = self.buffers or StaticBuffers(tower, [each for each in ladder if each <= budget])
                graph = Graph(tower, budget, self.buffers)
                graph.record(recorder)
                self._graphs[budget] = graph
            except RuntimeError as error:
                self.dropped[budget] = str(error).partition("\n")[0]
                _log.warning("cannot capture the budget of %d tokens: %s", budget.tokens, self.dropped[budget])
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()

    def __getitem__(self, budget: Budget) -> Graph:
        return self._graphs[budget]

    def __len__(self) -> int:
        return len(self._graphs)

    @property
    def ladder(self) -> Ladder:
        """The budgets that were captured."""
        return Ladder(tuple(sorted(self._graphs)))

    @property
    def nbytes(self) -> int:
        """Bytes of the static buffers that the graphs share."""
        return self.buffers.nbytes if self.buffers else 0

    def warmed_up(self, budget: Budget) -> Graph:
        """A graph of another budget, for `add`; it shares the static buffers, so it runs on the stream of the replays.

        Raises RuntimeError, also if the budget is larger than those at the start.
        """
        if self.buffers is None or budget.tokens > self.buffers.tokens:
            raise RuntimeError(f"a budget of {budget.tokens} tokens is larger than the static buffers")
        graph = Graph(self._tower, budget, self.buffers)
        graph.warm_up()
        return graph

    def add(self, graph: Graph, recorder: Recorder) -> None:
        """Capture a graph while batches are in flight. Raises RuntimeError."""
        graph.capture(recorder)
        self._graphs[graph.budget] = graph

    def keep(self, ladder: Ladder) -> None:
        """Drop the graphs of all other budgets; none of them may be in flight."""
        self._graphs = {budget: self._graphs[budget] for budget in ladder}


def _compute(tower: Tower, pixels: Tensor, metadata: Metadata, rows: Tensor) -> None:
    rows.copy_(tower.forward(pixels, metadata))


def _no_pixels(pixels: Tensor, crops: Tensor | None) -> None:
    pixels.zero_()
    if crops is not None:
        crops.zero_()
