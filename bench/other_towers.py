"""Measures towers of other makers than Qwen: plain transformers, our engine eagerly and by graph, and the floor."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite
from typing import Any

import torch
from bench.engine_times import EngineTimes, Ran
from bench.floor import Ceilings, counted_flop
from bench.random_towers import OtherTower, RandomTower, random_tower
from bench.stock import Forward
from bench.stopwatch import FAILURES, Row, Stopwatch
from torch import Tensor

from vitwire_server.core.grids import Grid
from vitwire_server.core.items import DType, Item, Modality, Pixels
from vitwire_server.core.models import TileGeometry
from vitwire_server.runtime.attention.selection import Selection, select
from vitwire_server.towers.tower import Tower

COLUMNS = ("plain_sdpa", "eager", "graph_stock", "graph", "floor", "rows_per_s", "norm_error")
SECONDS_EACH = 0.8
"""A measurement ends after this many seconds or after --repeats, but not before three repeats."""
RIGHT = 0.1
"""Norm error of rows that are the right ones: two images' rows are about 1.4 apart, bfloat16 loses about 0.01."""


@dataclass(frozen=True, slots=True)
class OtherLoad:
    """Images of one size that share a forward."""

    row: Row
    items: Sequence[Item]
    plain: Forward
    expected: Tensor
    """The rows of plain transformers."""


class OtherBench:
    """Measures one tower after another into `rows`."""

    def __init__(self, stopwatch: Stopwatch, captures: list[Row], ceilings: Ceilings, *, attention: str) -> None:
        """`attention` is the server's --attention-backend, for towers of packed patches."""
        self.rows: list[Row] = []
        self._stopwatch, self._captures = stopwatch, captures
        self._ceilings, self._attention = ceilings, attention

    def run(self, name: str, other: OtherTower, device: torch.device) -> str:
        """Both loads of a tower; returns what attends in it. Raises what a tower fails with."""
        built = random_tower(other, torch.bfloat16, device)
        tower = built.tower
        loads = {str(load.row["load"]): load for load in self._loads(name, other, built)}
        for load in loads.values():
            once = partial(self._stopwatch.timed, load.plain)
            self._stopwatch.measure(load.row, "plain_sdpa", once, SECONDS_EACH)
        choice = _chosen(tower, self._attention)
        times = EngineTimes(tower, name, self._stopwatch, self._captures, SECONDS_EACH)
        batches = {load: own.items for load, own in loads.items()}
        rows = {load: own.row for load, own in loads.items()}
        for column, ran in times.measured(batches, rows, choice):
            for load in loads.values():
                self._check(load, column, ran)
        for load in loads.values():
            if best := load.row["graph"] or load.row["eager"]:
                load.row["rows_per_s"] = round(load.row["rows"] / best * 1e3)
        return f"{choice.name}, {choice.reason}" if choice else "sdpa, the only one for tiles"

    def _loads(self, name: str, other: OtherTower, built: RandomTower) -> list[OtherLoad]:
        tower, most = built.tower, other.batch
        shape = tower.geometry.shapes(other.grid, Modality.IMAGE)[0]
        pixels = [torch.randn(shape, dtype=tower.dtype, device=tower.device) for _ in range(most)]
        items = [_item(tower, other, own) for own in pixels]
        floor = self._floor(name, other, built, pixels[:1])
        loads = []
        for count in (1, most):
            row: Row = {
                "tower": name,
                "load": f"{count} x {_size(tower, other.grid)}",
                "rows": count * items[0].rows,
                **dict.fromkeys(COLUMNS),
                "floor": floor(count),
            }
            self.rows.append(row)
            forward = torch.inference_mode()(other.plain(built.model, pixels[:count], [other.grid] * count))
            loads.append(OtherLoad(row, items[:count], forward, forward().float()))
        return loads

    def _floor(
        self, name: str, other: OtherTower, built: RandomTower, pixels: Sequence[Tensor]
    ) -> Callable[[int], float | None]:
        """Milliseconds by the number of images: the least work that either forward does for one of them alone."""
        ours = partial(_forward, built.tower, other, pixels[0])
        try:
            flop = min(counted_flop(forward) for forward in (other.plain(built.model, pixels, [other.grid]), ours))
        except FAILURES as error:
            self._stopwatch.failed(f"{name} floor", error)
            return lambda _: None
        ceilings = self._ceilings
        reading = built.weights_nbytes / ceilings.bytes_per_second
        return lambda images: round(1e3 * max(images * flop / ceilings.flops, reading), 3)

    def _check(self, load: OtherLoad, column: str, ran: Ran) -> None:
        """Write how far our rows are from those of plain transformers; the times of wrong rows are left out."""
        row = load.row
        if row[column] is None:
            return
        error = _error(ran.results(load.items), load.expected)
        row["norm_error"] = max(round(error, 4), row["norm_error"] or 0.0) if isfinite(error) else None
        if not error < RIGHT:
            row[column] = None
            where = f"{row['tower']} {row['load']} {column}"
            self._stopwatch.left_out.append(f"{where}: rows differ from those of plain transformers by {error:.2f}")


def _size(tower: Tower, grid: Grid) -> str:
    """Pixels of an image, which is square or of several square tiles."""
    geometry = tower.geometry
    if not isinstance(geometry, TileGeometry):
        return f"{grid.h * geometry.patch}^2"
    tile = f"{geometry.tile[0]}^2"
    return tile if grid.t == 1 else f"{grid.t} tiles of {tile}"


def _chosen(tower: Tower, attention: str) -> Selection | None:
    """Attend by the backend that the server chooses for --attention-backend `attention`; None for towers of tiles."""
    if not tower.segmented:
        return None
    own = tower.attention_heads
    choice = select(attention, tower.device, tower.dtype, *own, captured=True, resampler=tower.resampler_heads)
    tower.use_attention(choice.implementation)
    return choice


def _item(tower: Tower, other: OtherTower, pixels: Tensor) -> Item:
    """An image as the server's item."""
    dtype = DType.of(str(pixels.dtype).removeprefix("torch."))
    data = bytes(pixels.cpu().contiguous().view(torch.uint8).numpy().data)
    given = Pixels(data, dtype, tuple(pixels.shape))
    return Item(Modality.IMAGE, other.grid, given, tower.footprint(other.grid), dtype)


def _forward(tower: Tower, other: OtherTower, pixels: Tensor) -> Tensor:
    """The tower's own forward of one image, before any backend of attention is chosen."""
    metadata = tower.reserve(tower.exact([other.grid]))
    tower.prepare([other.grid], metadata)
    return tower.forward(pixels.flatten(1), metadata)


def _error(results: Sequence[Any], expected: Tensor) -> float:
    """The distance of our rows from float32 rows, relative in norm. Raises the failure of an item."""
    rows = torch.cat([_rows(result) for result in results]).to(expected)
    return float((rows - expected).norm() / expected.norm())


def _rows(result: Any) -> Tensor:
    """Rows of one item. Raises the failure that stands in their place."""
    if isinstance(result, Exception):
        raise result
    return torch.frombuffer(bytearray(result.data), dtype=torch.bfloat16).view(result.shape)
