"""A tower with its engine on any device, put together as a server does it, and what its rows are judged by.

It imports nothing but core, scheduling, towers and runtime, so that it runs where only torch and
transformers are installed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from reference import Array, norm_error
from vitwire_server.core.budgets import Budget, Ladder
from vitwire_server.core.geometries import MarginGeometry
from vitwire_server.core.grids import Grid
from vitwire_server.core.items import DType, Embedding, Item, Modality, Pixels, total
from vitwire_server.core.models import Preprocessing, TileGeometry
from vitwire_server.core.plans import Fallback
from vitwire_server.core.pooling import Pooling
from vitwire_server.core.runner import Collected
from vitwire_server.runtime.attention.selection import Selection, select
from vitwire_server.runtime.engine import Engine
from vitwire_server.runtime.graphs import CudaRecorder, GraphSet, Recorder, SimulatedRecorder
from vitwire_server.runtime.memory.streams import CudaStreams, HostStreams, Streams
from vitwire_server.runtime.staging import Stager
from vitwire_server.scheduling.planner import Bounds, Planner
from vitwire_server.towers.checkpoints.checkpoint import load_tower, open_checkpoint
from vitwire_server.towers.checkpoints.lora import Adapter
from vitwire_server.towers.tower import Tower

BUDGETS = (16, 48, 160, 320)
_MOST = 1200
"""Tokens of a budget at most: tiles of some towers are large."""
RIGHT = 0.1
"""Norm error of rows that are the right ones: two items' rows are about 1.4 apart, bfloat16 loses about 0.01."""

_TILED = [(1, 1, 1), (2, 1, 1), (2, 1, 2), (3, 1, 2), (5, 2, 2), (4, 2, 2), (7, 3, 2), (3, 1, 1), (2, 2, 1)]
"""Grids of tiles, in counts that every tower of tiles takes one or another of."""

Wrap = Callable[[Recorder], Recorder]


@dataclass
class Rig:
    """A tower with graphs on a device."""

    tower: Tower
    engine: Engine
    graphs: GraphSet
    planner: Planner
    modalities: Mapping[Modality, Preprocessing]
    streams: Streams
    recorder: Recorder

    @classmethod
    def of(
        cls,
        folder: Path,
        dtype: torch.dtype,
        device: torch.device,
        *,
        sizes: Sequence[int] = BUDGETS,
        wrap: Wrap = lambda recorder: recorder,
        adapter: Adapter | None = None,
        attention: Selection | None = None,
        pooling: Pooling = Pooling.NONE,
        fused: bool = True,
    ) -> "Rig":
        """Graphs are captured on CUDA and simulated elsewhere; `wrap` may stand between them and their recorder.

        With `attention`, budgets are captured for short segments as well where it attends to them in another way.
        """
        checkpoint = open_checkpoint(str(folder)).pooled(pooling)
        tower = load_tower(checkpoint, dtype=dtype, device=device, adapter=adapter).tower
        choice = attention or select(
            "auto", device, dtype, *tower.attention_heads, captured=bool(sizes), resampler=tower.resampler_heads
        )
        tower.use_attention(choice.implementation)
        if device.type == "cuda" and fused:
            from vitwire_server.runtime.fused.fusing import fuse_tower  # noqa: PLC0415 - triton comes with CUDA

            fuse_tower(tower, choice if tower.segmented else None)
        streams: Streams = CudaStreams(device) if device.type == "cuda" else HostStreams()
        recorder: Recorder = CudaRecorder(streams.compute) if isinstance(streams, CudaStreams) else SimulatedRecorder()
        ladder = Ladder(tuple(_budgets(tower, sizes)))
        if attention:
            ladder = attention.completed(ladder, merge=tower.geometry.merge)
        graphs = GraphSet(tower, ladder, wrap(recorder))
        modalities = checkpoint.preprocessing()
        stager = Stager(tower.geometry, modalities, device)
        most = max([320, *(budget.tokens for budget in graphs.ladder)])
        planner = Planner(graphs.ladder, Bounds(most, 8, 24), without_graph=Fallback.GRAPHS_OFF)
        return cls(tower, Engine(tower, graphs, stager, streams), graphs, planner, modalities, streams, recorder)

    def pixels(self, grid: Grid, seed: int) -> Tensor:
        """Random pixels as the processor emits them, in the tower's dtype, on the host."""
        return self._drawn(self.tower.geometry.shapes(grid, self.modality(grid))[0], seed)

    def crops(self, grid: Grid, seed: int) -> Tensor | None:
        """Random crops; None if an item of this grid has none."""
        shape = self.tower.geometry.crops(grid)
        return self._drawn(shape, seed + 1000) if shape else None

    def modality(self, grid: Grid) -> Modality:
        """A clip, if it can be no image."""
        return Modality.VIDEO if list(self.tower.geometry.wrong(grid, Modality.IMAGE)) else Modality.IMAGE

    def item(self, grid: Grid, pixels: Tensor, crops: Tensor | None = None) -> Item:
        """An item whose rows are to come back in float32."""
        tiles, second = _buffer(pixels), _buffer(crops) if crops is not None else None
        footprint = self.tower.footprint(grid)
        return Item(self.modality(grid), grid, tiles, footprint, DType.FLOAT32, crops=second)

    def items(self, grids: Sequence[Grid], seed: int = 0) -> list[Item]:
        """Items of these grids, each with different pixels: item i has those of seed + i."""
        return [
            self.item(grid, self.pixels(grid, seed + i), self.crops(grid, seed + i)) for i, grid in enumerate(grids)
        ]

    def _drawn(self, shape: Sequence[int], seed: int) -> Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(self.tower.dtype)

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
        assert self.graphs.buffers is not None
        self.graphs.buffers.inputs.tensor.fill_(torch.nan)
        self.graphs.buffers.rows.fill_(torch.nan)
        for size in self.graphs.ladder:
            self.graphs[size].metadata.laid = ()
            tensors = self.graphs[size].metadata.tensors
            for key in tensors.keys() & {"cu_seqlens", "cu_window_seqlens", "window_index"}:
                tensors[key].fill_(-1)
        if self.tower.device.type == "cuda":
            torch.cuda.synchronize(self.tower.device)  # the engine's stream does not wait for this one


def draw_grids(rig: Rig, seed: int, count: int) -> list[Grid]:
    """Images and clips that the tower takes, the smallest and one larger than every budget included."""
    rng = np.random.default_rng(seed)
    geometry = rig.tower.geometry
    if isinstance(geometry, TileGeometry) and not isinstance(geometry, MarginGeometry):
        drawn = [Grid(*_TILED[i]) for i in rng.permutation(len(_TILED))]
    else:
        sides = rng.integers(1, 12, size=(3 * count, 2)) * 2
        frames = rng.choice([1, 1, 2, 3, 4, 5], size=3 * count)
        drawn = [Grid(int(t), int(h), int(w)) for t, (h, w) in zip(frames, sides, strict=True)]
        drawn = [Grid(1, 2, 2), Grid(3, 2, 2), Grid(1, 6, 12), Grid(2, 4, 6), Grid(1, 42, 36), *drawn, Grid(1, 8, 12)]
    if isinstance(geometry, MarginGeometry):  # odd sides too: patches of background are averaged with others
        drawn = [Grid(t, h - number % 2, w - number // 2 % 2) for number, (t, h, w) in enumerate(drawn)]
    taken = [grid for grid in drawn if takes(rig, grid)]
    return taken[:count]


def takes(rig: Rig, grid: Grid) -> bool:
    modality = rig.modality(grid)
    return not list(rig.tower.geometry.wrong(grid, modality)) and modality in rig.modalities


class Whole(Protocol):
    """A whole model, stock."""

    def item(self, grid: tuple[int, int, int], pixels: Tensor, crops: Tensor | None = None) -> Array:
        """The embedding of one item."""
        ...


@dataclass(frozen=True)
class Yardstick:
    """Plain transformers in float32 on the host, and in another dtype on the device under test."""

    exact: Whole
    rounded: Whole

    def expected(self, rig: Rig, grids: Sequence[Grid], seed: int = 0) -> list[Array]:
        """Rows of `rig.items(grids, seed)`, each encoded alone."""
        return self._alone(self.exact, rig, grids, seed)

    def lost(self, rig: Rig, grids: Sequence[Grid], seed: int = 0) -> list[float]:
        """Norm errors of transformers' own rounded rows."""
        exact = self.expected(rig, grids, seed)
        own = self._alone(self.rounded, rig, grids, seed)
        return [norm_error(rows, expected) for rows, expected in zip(own, exact, strict=True)]

    def errors(self, rig: Rig, rows: Sequence[Array], grids: Sequence[Grid], seed: int = 0) -> list[float]:
        """Norm errors of rows of `rig.items(grids, seed)`; infinite where shapes differ or NaN shows."""
        exact = self.expected(rig, grids, seed)
        return [_error(own, expected) for own, expected in zip(rows, exact, strict=True)]

    @staticmethod
    def _alone(reference: Whole, rig: Rig, grids: Sequence[Grid], seed: int) -> list[Array]:
        return [
            reference.item(grid, rig.pixels(grid, seed + i), rig.crops(grid, seed + i)) for i, grid in enumerate(grids)
        ]


def rows_of(collected: Collected) -> list[Array]:
    """The rows of a batch none of whose items failed."""
    rows = []
    for result in collected.results:
        assert isinstance(result, Embedding), result
        rows.append(np.frombuffer(result.data, np.float32).reshape(result.shape))
    return rows


def _budgets(tower: Tower, sizes: Sequence[int]) -> list[Budget]:
    """Of these sizes; where tokens come in tiles, every other one of the tower's own, up to 20 tiles."""
    if tower.segmented or not sizes:
        area = tower.geometry.merge**2
        slots = {size: max(8, min(24, size // 4)) for size in sizes}
        return [Budget(size, size * area, max_items=min(size, 8), max_segments=slots[size]) for size in sizes]
    own = tower.sizes(min(20 * tower.footprint(Grid(1, 1, 1)).tokens, _MOST))
    return [tower.budget(size, max_items=8, max_frames=24) for size in own[::2]]


def _buffer(pixels: Tensor) -> Pixels:
    dtype = DType.of(str(pixels.dtype).removeprefix("torch."))
    return Pixels(pixels.contiguous().view(torch.uint8).numpy().tobytes(), dtype, tuple(pixels.shape))


def _error(rows: Array, expected: Array) -> float:
    if rows.shape != expected.shape or not np.isfinite(rows).all():
        return float("inf")
    return norm_error(rows, expected)
