"""The engine: owns the device, the tower and its graphs; one thread calls it."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vitwire_server.core.budgets import Budget
from vitwire_server.core.errors import EncodeFailed, NonFinite
from vitwire_server.core.items import Item
from vitwire_server.core.runner import Collected, Timings
from vitwire_server.runtime.graphs import GraphSet
from vitwire_server.runtime.staging import TORCH_TYPES, Stager, embedding
from vitwire_server.towers.packed import PackedTower


@dataclass(frozen=True, slots=True)
class Launch:
    """A batch whose forward was started; implements core's `Running`."""

    items: Sequence[Item]
    rows: Sequence[Tensor]
    """Rows of each item, in buffers of their own."""
    finite: Tensor
    """`(items,)`, on the device: whether all rows of an item are finite."""
    stage_in: float
    execute: float

    def collect(self) -> Collected:
        """Bring the rows to the host. Raises EncodeFailed if the device failed."""
        start = time.perf_counter()
        try:
            finite: list[bool] = self.finite.tolist()
            results = [
                embedding(rows.cpu(), item.output) if ok else _non_finite(item)
                for item, rows, ok in zip(self.items, self.rows, finite, strict=True)
            ]
        except RuntimeError as error:
            raise EncodeFailed(f"the device failed: {_first_line(error)}") from error
        return Collected(results, Timings(self.stage_in, self.execute, time.perf_counter() - start))


class Engine:
    """Runs batches on a tower: replays of its graphs, or eager forwards at the exact shape.

    `depth` is 1: a launch on CPU returns when its forward is done.
    """

    depth = 1

    def __init__(self, tower: PackedTower, graphs: GraphSet, stager: Stager) -> None:
        self._tower = tower
        self._graphs = graphs
        self._stager = stager

    @torch.inference_mode()
    def launch(self, items: Sequence[Item], budget: Budget | None) -> Launch:
        """Stage `items` and run their forward. Raises EncodeFailed if the device failed."""
        try:
            return self._replay(items, budget) if budget else self._eager(items)
        except RuntimeError as error:
            raise EncodeFailed(f"the device failed: {_first_line(error)}") from error

    def _replay(self, items: Sequence[Item], budget: Budget) -> Launch:
        start = time.perf_counter()
        graph = self._graphs[budget]
        graph.load([item.grid for item in items], lambda out: self._fill(items, out))
        staged = time.perf_counter()
        return self._launched(items, graph.replay(), start, staged)

    def _eager(self, items: Sequence[Item]) -> Launch:
        start = time.perf_counter()
        tower = self._tower
        grids = [item.grid for item in items]
        metadata = tower.reserve(tower.exact(grids))
        tower.prepare(grids, metadata)
        columns = tower.geometry.columns(frames=tower.geometry.temporal)
        pixels = torch.empty(metadata.capacity.patches, columns, dtype=tower.dtype, device=tower.device)
        self._fill(items, pixels)
        staged = time.perf_counter()
        return self._launched(items, tower.forward(pixels, metadata), start, staged)

    def _fill(self, items: Sequence[Item], out: Tensor) -> None:
        patches = [item.footprint.patches for item in items]
        for item, rows in zip(items, torch.split(out, patches), strict=True):
            self._stager.stage(item.pixels, item.modality, rows)

    def _launched(self, items: Sequence[Item], rows: Tensor, start: float, staged: float) -> Launch:
        """Rows leave the static buffer, which the next replay overwrites, in the type asked for."""
        parts = self._tower.split(rows, [item.footprint for item in items])
        finite = torch.stack([part.isfinite().all() for part in parts])
        own = [part.to(TORCH_TYPES[item.output], copy=True) for item, part in zip(items, parts, strict=True)]
        return Launch(items, own, finite, staged - start, time.perf_counter() - staged)


def _non_finite(item: Item) -> NonFinite:
    return NonFinite(f"the embedding of this {item.modality} of grid {item.grid} is not finite")


def _first_line(error: RuntimeError) -> str:
    return str(error).partition("\n")[0]
