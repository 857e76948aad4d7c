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
from vitwire_server.core.items import total
from vitwire_server.towers.tower import Tower

_log = logging.getLogger(__name__)
_WARM_UPS = 3

Fill = Callable[[Tensor, Tensor | None], None]
"""Writes the pixels of a batch, and its crops in towers that take some, into the rows it is given."""


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


class Slab:
    """Static input rows of all graphs, of which each uses the first so many.

    Rows from `_dirty` on are zero, which is all that the reset of a stale tail relies on.
    """

    def __init__(self, rows: int, columns: int, tower: Tower) -> None:
        self.tensor = torch.zeros(rows, columns, dtype=tower.dtype, device=tower.device)
        self._dirty = 0

    def take(self, used: int, capacity: int) -> Tensor:
        """The first `used` rows, for the caller to write; those from there to `capacity` become padding.

        Raises ValueError if there are more rows than the capacity.
        """
        if used > capacity:
            raise ValueError(f"{used} rows of pixels do not fit a budget of {capacity}")
        stale = self._dirty
        self._dirty = used if stale <= capacity else stale
        self.tensor[used : max(used, min(stale, capacity))].zero_()
        return self.tensor[:used]


class Arena:
    """Static inputs and output of all graphs, sized for the largest of their budgets.

    Graphs replay one after the other, so each uses the first rows of the same buffers, which lie
    outside the pool of the graphs.
    """

    def __init__(self, tower: Tower, budgets: Sequence[Budget]) -> None:
        geometry = tower.geometry
        capacities = [tower.capacity(budget) for budget in budgets]
        tokens = max(budget.tokens for budget in budgets)
        self.inputs = Slab(max(capacity.patches for capacity in capacities), geometry.row, tower)
        crops = max(capacity.crops for capacity in capacities)
        self.crop_inputs = Slab(crops, geometry.crop_row, tower) if geometry.crop_row else None
        self.rows = torch.zeros(tokens, geometry.width, dtype=tower.dtype, device=tower.device)

    @property
    def pixels(self) -> Tensor:
        """The input buffer."""
        return self.inputs.tensor

    @property
    def crops(self) -> Tensor | None:
        """The buffer of crops, in towers that take them."""
        return self.crop_inputs.tensor if self.crop_inputs else None

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return self.pixels.nbytes + self.rows.nbytes + (self.crops.nbytes if self.crops is not None else 0)


class Graph:
    """One recorded forward with the metadata buffers it reads."""

    def __init__(self, tower: Tower, budget: Budget, arena: Arena, recorder: Recorder) -> None:
        """Record the forward on a batch of the budget's size. Raises RuntimeError."""
        self.budget = budget
        self.metadata = tower.reserve(tower.capacity(budget))
        if arena.crops is not None:
            self.metadata.crops = arena.crops[: self.metadata.capacity.crops]
        self._tower = tower
        self._arena = arena
        self._pixels = arena.pixels[: self.metadata.capacity.patches]
        self._rows = arena.rows[: budget.tokens]
        self.load(tower.samples(budget.tokens, budget.max_items), _no_pixels)
        self._replay = recorder.record(self._forward)

    def load(self, grids: Sequence[Grid], fill: Fill) -> None:
        """Write a batch into the static buffers. Raises ValueError if it does not fit."""
        capacity, load = self.metadata.capacity, total([self._tower.footprint(grid) for grid in grids])
        pixels = self._arena.inputs.take(load.patches, capacity.patches)
        crops = self._arena.crop_inputs.take(load.crops, capacity.crops) if self._arena.crop_inputs else None
        fill(pixels, crops)
        self._tower.prepare(grids, self.metadata)

    def replay(self) -> Tensor:
        """Run the recorded forward; returns the static rows, valid until the next replay."""
        self._replay()
        return self._rows

    def _forward(self) -> None:
        self._rows.copy_(self._tower.forward(self._pixels, self.metadata))


class GraphSet:
    """The captured graphs by budget, and why others could not be captured."""

    @torch.inference_mode()
    def __init__(
        self,
        tower: Tower,
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
                self.arena = self.arena or Arena(tower, [each for each in ladder if each <= budget])
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


def _no_pixels(pixels: Tensor, crops: Tensor | None) -> None:
    pixels.zero_()
    if crops is not None:
        crops.zero_()
