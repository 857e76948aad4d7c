"""Budget graphs: a forward recorded over static buffers, and the set of them.

A *simulated* graph calls what a CUDA graph would replay, on the same static buffers: so padding,
packing and the reuse of buffers are those of a GPU, and tested wherever Python runs.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from vitwire_server.core.budgets import Budget, Ladder
from vitwire_server.core.grids import Grid
from vitwire_server.towers.packed import Metadata, PackedTower

Fill = Callable[[Tensor], None]
"""Writes the pixels of a batch into the rows it is given."""


class Arena:
    """Static input and output of all graphs, sized for the largest budget.

    Graphs replay one after the other, so each uses the first rows of the same two buffers. Input
    rows from `_dirty` on are zero, which is all that the reset of a stale tail relies on.
    """

    def __init__(self, tower: PackedTower, largest: Budget) -> None:
        geometry = tower.geometry
        patches = largest.tokens * geometry.merge**2
        columns = geometry.columns(frames=geometry.temporal)
        self.pixels = torch.zeros(patches, columns, dtype=tower.dtype, device=tower.device)
        self.rows = torch.zeros(largest.tokens, geometry.width, dtype=tower.dtype, device=tower.device)
        self._dirty = 0

    def fill(self, fill: Fill, used: int, capacity: int) -> None:
        """Write `used` input rows; those from there to `capacity` become padding."""
        fill(self.pixels[:used])
        stale = min(self._dirty, capacity)
        if stale > used:
            self.pixels[used:stale].zero_()
        if self._dirty <= capacity:
            self._dirty = used


class Graph:
    """One recorded forward with the metadata buffers it reads."""

    def __init__(self, tower: PackedTower, budget: Budget, arena: Arena) -> None:
        self.budget = budget
        self._tower = tower
        self._arena = arena
        self._metadata: Metadata = tower.reserve(tower.capacity(budget))

    def load(self, grids: Sequence[Grid], fill: Fill) -> None:
        """Write a batch into the static buffers. Raises ValueError if it does not fit."""
        used = sum(grid.patches for grid in grids)
        capacity = self._metadata.capacity
        if used > capacity.patches:
            raise ValueError(f"{used} patches do not fit a budget of {capacity.patches}")
        self._arena.fill(fill, used, capacity.patches)
        self._tower.prepare(grids, self._metadata)

    def replay(self) -> Tensor:
        """Run the recorded forward; returns the static rows, valid until the next replay."""
        rows = self._arena.rows[: self.budget.tokens]
        rows.copy_(self._tower.forward(self._arena.pixels[: self._metadata.capacity.patches], self._metadata))
        return rows


class GraphSet:
    """The captured graphs, by budget."""

    @torch.inference_mode()
    def __init__(
        self, tower: PackedTower, ladder: Ladder, track: Callable[[Iterable[Budget]], Iterable[Budget]]
    ) -> None:
        """Capture every budget of `ladder`, largest first."""
        self.arena = Arena(tower, ladder.largest) if ladder.largest else None
        self._graphs: dict[Budget, Graph] = {}
        for budget in track(sorted(ladder, reverse=True)):
            self._graphs[budget] = self._capture(tower, budget)

    def __getitem__(self, budget: Budget) -> Graph:
        return self._graphs[budget]

    def __len__(self) -> int:
        return len(self._graphs)

    @property
    def nbytes(self) -> int:
        """Bytes of the static buffers that the graphs share."""
        return self.arena.pixels.nbytes + self.arena.rows.nbytes if self.arena else 0

    def _capture(self, tower: PackedTower, budget: Budget) -> Graph:
        """A graph that was replayed once on a batch of its size."""
        assert self.arena is not None
        graph = Graph(tower, budget, self.arena)
        merge = tower.geometry.merge
        grid = Grid(1, merge, merge * budget.tokens)
        graph.load([grid], Tensor.zero_)  # type: ignore[arg-type]  # returns its argument, which nobody reads
        graph.replay()
        return graph
