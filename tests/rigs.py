"""A tower with its engine on any device, put together as a server does it, and what its rows are judged by.

It imports nothing but core, scheduling, towers and runtime, so that it runs where only torch and
transformers are installed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from reference import Array, Reference, norm_error
from vitwire_server.core.budgets import Budget, Ladder
from vitwire_server.core.grids import Grid
from vitwire_server.core.items import DType, Item, Modality, Pixels, total
from vitwire_server.core.plans import Fallback
from vitwire_server.core.runner import Collected
from vitwire_server.runtime.attention import choose
from vitwire_server.runtime.engine import Engine
from vitwire_server.runtime.graphs import CudaRecorder, GraphSet, Recorder, Simulated
from vitwire_server.runtime.lanes import CudaLanes, HostLanes, Lanes
from vitwire_server.runtime.staging import Stager
from vitwire_server.scheduling.planner import Bounds, Planner
from vitwire_server.towers.checkpoint import load_tower, open_checkpoint
from vitwire_server.towers.packed import PackedTower
from vitwire_server.towers.preprocessing import read_preprocessing

BUDGETS = (16, 48, 160, 320)
RIGHT = 0.1
"""Norm error of rows that are the right ones: two items' rows are about 1.4 apart, bfloat16 loses about 0.01."""

Wrap = Callable[[Recorder], Recorder]


@dataclass
class Rig:
    """A tower with graphs on a device."""

    tower: PackedTower
    engine: Engine
    graphs: GraphSet
    planner: Planner

    @classmethod
    def of(
        cls,
        folder: Path,
        dtype: torch.dtype,
        device: torch.device,
        *,
        sizes: Sequence[int] = BUDGETS,
        wrap: Wrap = lambda recorder: recorder,
    ) -> "Rig":
        """Graphs are captured on CUDA and simulated elsewhere; `wrap` may stand between them and their recorder."""
        checkpoint = open_checkpoint(str(folder))
        tower = load_tower(checkpoint, dtype=dtype, device=device, track=lambda shards, *_: shards).tower
        choice = choose("auto", device, dtype, *tower.heads, captured=bool(sizes))
        tower.use_attention(choice.backend.implementation)
        lanes: Lanes = CudaLanes(device) if device.type == "cuda" else HostLanes()
        recorder: Recorder = CudaRecorder(lanes.compute) if isinstance(lanes, CudaLanes) else Simulated()
        area = tower.geometry.merge**2
        ladder = Ladder(tuple(Budget(n, min(n, 8), max(8, min(24, n // 4)), n * area) for n in sizes))
        graphs = GraphSet(tower, ladder, wrap(recorder))
        stager = Stager(tower.geometry, read_preprocessing(folder, checkpoint.family), device)
        planner = Planner(graphs.ladder, Bounds(320, 8, 24), without_graph=Fallback.GRAPHS_OFF)
        return cls(tower, Engine(tower, graphs, stager, lanes), graphs, planner)

    def pixels(self, grid: Grid, seed: int) -> Tensor:
        """Random pixels as the processor emits them, in the tower's dtype, on the host."""
        columns = self.tower.geometry.columns(frames=self.tower.geometry.temporal)
        drawn = torch.randn(grid.patches, columns, generator=torch.Generator().manual_seed(seed))
        return drawn.to(self.tower.dtype)

    def item(self, grid: Grid, pixels: Tensor) -> Item:
        """An item whose rows are to come back in float32."""
        modality = Modality.IMAGE if grid.t == 1 else Modality.VIDEO
        dtype = DType.of(str(pixels.dtype).removeprefix("torch."))
        view = Pixels(pixels.contiguous().view(torch.uint8).numpy().tobytes(), dtype, tuple(pixels.shape))
        return Item(modality, grid, view, self.tower.footprint(grid), DType.FLOAT32)

    def items(self, grids: Sequence[Grid], seed: int = 0) -> list[Item]:
        """Items of these grids, each with pixels of its own: item i has those of seed + i."""
        return [self.item(grid, self.pixels(grid, seed + i)) for i, grid in enumerate(grids)]

    def holding(self, items: Sequence[Item]) -> Budget:
        """The smallest captured budget that holds all of them."""
        load = total([item.footprint for item in items])
        found = self.graphs.ladder.smallest_fitting(load, len(items))
        assert found, f"no budget holds {load}"
        return found

    def run(self, items: Sequence[Item]) -> list[Array]:
        """Rows of each item, packed by the planner."""
        rows: dict[int, Array] = {}
        for batch in self.planner.plan([item.footprint for item in items]).batches:
            collected = self.engine.launch([items[i] for i in batch.items], batch.budget).collect()
            rows |= dict(zip(batch.items, rows_of(collected), strict=True))
        return [rows[i] for i in range(len(items))]

    @torch.inference_mode()
    def poison(self) -> None:
        """NaN in the static buffers, padding included, and nonsense in whatever is always laid out anew."""
        assert self.graphs.arena is not None
        self.graphs.arena.pixels.fill_(torch.nan)
        self.graphs.arena.rows.fill_(torch.nan)
        for size in self.graphs.ladder:
            tensors = self.graphs[size].metadata.tensors
            for key in tensors.keys() & {"cu_seqlens", "cu_window_seqlens", "window_index"}:
                tensors[key].fill_(-1)
        if self.tower.device.type == "cuda":
            torch.cuda.synchronize(self.tower.device)  # the engine's stream does not wait for this one


@dataclass(frozen=True)
class Yardstick:
    """Plain transformers in float32 on the host, and in another dtype on the device under test."""

    exact: Reference
    rounded: Reference

    def expected(self, rig: Rig, grids: Sequence[Grid], seed: int = 0) -> list[Array]:
        """Rows of `rig.items(grids, seed)`, each encoded alone."""
        return [self.exact.encode(rig.pixels(grid, seed + i), [grid])[0] for i, grid in enumerate(grids)]

    def lost(self, rig: Rig, grids: Sequence[Grid], seed: int = 0) -> list[float]:
        """Norm errors of transformers' own rounded rows."""
        exact = self.expected(rig, grids, seed)
        own = [self.rounded.encode(rig.pixels(grid, seed + i), [grid])[0] for i, grid in enumerate(grids)]
        return [norm_error(rows, expected) for rows, expected in zip(own, exact, strict=True)]

    def errors(self, rig: Rig, rows: Sequence[Array], grids: Sequence[Grid], seed: int = 0) -> list[float]:
        """Norm errors of rows of `rig.items(grids, seed)`; infinite where shapes differ or NaN shows."""
        exact = self.expected(rig, grids, seed)
        return [_error(own, expected) for own, expected in zip(rows, exact, strict=True)]


def rows_of(collected: Collected) -> list[Array]:
    """The rows of a batch none of whose items failed."""
    for result in collected.results:
        assert not isinstance(result, Exception), result
    return [np.frombuffer(result.data, np.float32).reshape(result.shape) for result in collected.results]


def _error(rows: Array, expected: Array) -> float:
    if rows.shape != expected.shape or not np.isfinite(rows).all():
        return float("inf")
    return norm_error(rows, expected)
