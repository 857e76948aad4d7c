"""Budget graphs: a forward recorded over static buffers, and the set of them.

A *simulated* graph calls what a CUDA graph would replay, on the same static buffers: so padding,
packing and the reuse of buffers are those of a GPU, and tested wherever Python runs.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from vitwire_server.core.budgets import Budget, Ladder
from vitwire_server.core.grids import Grid
from vitwire_server.towers.packed import PackedTower

_log = logging.getLogger(__name__)
_WARM_UPS = 3

Fill = Callable[[Tensor], None]
"""Writes the pixels of a batch into the rows it is given."""


class Recorder(Protocol):
    """Turns a forward over static buffers into something that can be replayed."""

    name: str

    def record(self, forward: Callable[[], None]) -> Callable[[], None]:
        """Run `forward` at least once and return its replay. Raises RuntimeError."""
        ...


class Simulated:
    """A replay is a call of the same function."""

    name = "simulated"

    def record(self, forward: Callable[[], None]) -> Callable[[], None]:
        forward()
        return forward


class CudaRecorder:
    """CUDA graphs that share one memory pool, captured on the stream that they are replayed on."""

    name = "cuda"

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._pool = torch.cuda.graph_pool_handle()
        self._invalidated: list[torch.cuda.CUDAGraph] = []
        """Kept, as torch's host allocator may go on asking them about their capture."""

    def record(self, forward: Callable[[], None]) -> Callable[[], None]:
        # What the forward reads was written on the caller's stream.
        caller = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(caller)
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UPS):  # handles, autotuning and lazy set-up must not be captured
                forward()
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            # The outer context puts the caller's stream back, which a capture that fails does not.
            with torch.cuda.stream(caller), torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                forward()
        except RuntimeError:
            self._abandon(graph)
            raise
        return graph.replay

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """Leave torch's allocator as if this capture had never begun, and go on with another pool.

        A capture that CUDA invalidated is never ended in the allocator: it would refuse the pool to every
        later capture, and hold back all memory that streams share.
        """
        try:
            torch._C._cuda_endAllocateToPool(self._stream.device_index, self._pool)  # noqa: SLF001 - torch has no other way
        except RuntimeError:
            pass  # ended, as after running out of memory
        else:
            self._invalidated.append(graph)
        self._pool = torch.cuda.graph_pool_handle()


class Arena:
    """Static input and output of all graphs, sized for the largest budget.

    Graphs replay one after the other, so each uses the first rows of the same two buffers, which
    lie outside the pool of the graphs. Input rows from `_dirty` on are zero, which is all that the
    reset of a stale tail relies on.
    """

    def __init__(self, tower: PackedTower, largest: Budget) -> None:
        geometry = tower.geometry
        patches = largest.tokens * geometry.merge**2
        columns = geometry.columns(frames=geometry.temporal)
        self.pixels = torch.zeros(patches, columns, dtype=tower.dtype, device=tower.device)
        self.rows = torch.zeros(largest.tokens, geometry.width, dtype=tower.dtype, device=tower.device)
        self._dirty = 0

    @property
    def nbytes(self) -> int:
        """Bytes of both buffers."""
        return self.pixels.nbytes + self.rows.nbytes

    def fill(self, fill: Fill, used: int, capacity: int) -> None:
        """Write `used` input rows; those from there to `capacity` become padding."""
        stale = self._dirty
        self._dirty = max(stale, used)
        fill(self.pixels[:used])
        self.pixels[used : max(used, min(stale, capacity))].zero_()
        if stale <= capacity:
            self._dirty = used


class Graph:
    """One recorded forward with the metadata buffers it reads."""

    def __init__(self, tower: PackedTower, budget: Budget, arena: Arena, recorder: Recorder) -> None:
        """Record the forward on a batch of the budget's size. Raises RuntimeError."""
        self.budget = budget
        self.metadata = tower.reserve(tower.capacity(budget))
        self._tower = tower
        self._arena = arena
        self._rows = arena.rows[: budget.tokens]
        self.load(sample_grids(budget.tokens, budget.max_items, tower.geometry.merge), _no_pixels)
        self._replay = recorder.record(self._forward)

    def load(self, grids: Sequence[Grid], fill: Fill) -> None:
        """Write a batch into the static buffers. Raises ValueError if it does not fit."""
        used = sum(grid.patches for grid in grids)
        patches = self.metadata.capacity.patches
        if used > patches:
            raise ValueError(f"{used} patches do not fit a budget of {patches}")
        self._arena.fill(fill, used, patches)
        self._tower.prepare(grids, self.metadata)

    def replay(self) -> Tensor:
        """Run the recorded forward; returns the static rows, valid until the next replay."""
        self._replay()
        return self._rows

    def _forward(self) -> None:
        self._rows.copy_(self._tower.forward(self._arena.pixels[: self.metadata.capacity.patches], self.metadata))


class GraphSet:
    """The captured graphs by budget, and why others could not be captured."""

    @torch.inference_mode()
    def __init__(
        self,
        tower: PackedTower,
        ladder: Ladder,
        recorder: Recorder,
        track: Callable[[Iterable[Budget]], Iterable[Budget]] = lambda budgets: budgets,
    ) -> None:
        """Capture every budget of `ladder`, largest first; one that fails is dropped."""
        self.arena: Arena | None = None
        self.dropped: dict[Budget, str] = {}
        self._graphs: dict[Budget, Graph] = {}
        for budget in track(sorted(ladder, reverse=True)):
            try:
                self.arena = self.arena or Arena(tower, budget)
                self._graphs[budget] = Graph(tower, budget, self.arena, recorder)
            except RuntimeError as error:
                self._drop(budget, str(error).partition("\n")[0])

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
        return self.arena.nbytes if self.arena else 0

    def _drop(self, budget: Budget, reason: str) -> None:
        _log.warning("no graph for a budget of %d tokens: %s", budget.tokens, reason)
        self.dropped[budget] = reason
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def sample_grids(tokens: int, items: int, merge: int) -> list[Grid]:
    """At most `items` images that together have exactly `tokens` tokens: squares of 256, and a strip."""
    squares = min(tokens // 256, items - 1)
    grids = [Grid(1, 16 * merge, 16 * merge)] * squares
    if rest := tokens - 256 * squares:
        grids.append(Grid(1, merge, merge * rest))
    return grids


def _no_pixels(rows: Tensor) -> None:
    rows.zero_()
