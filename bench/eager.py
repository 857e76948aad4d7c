"""Eager forwards of one image in turns with plain transformers: they are bound by the host, so its clock counts."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median, quantiles

import torch
from bench.catalogue import OTHERS
from bench.columns import Columns, Ran, fused
from bench.kernels import kernel_times
from bench.models import PUBLISHED, build, draw, items, plain, square
from bench.models import shrunk as shrunk_qwen
from bench.others import chosen, error_of, item_of, size_of
from bench.random_towers import random_tower, shrunk
from bench.stock import Forward
from bench.stopwatch import Row, Stopwatch
from bench.timing import repeated

from vitwire_server.core.budgets import Ladder
from vitwire_server.core.items import Item, Modality
from vitwire_server.runtime.attention.selection import Selection
from vitwire_server.towers.tower import Tower

_SIDES = (224, 448)
"""Of the square images for Qwen's towers."""
_LEAST, _SECONDS = 15, 1.5
"""Rounds of a measurement at least, and seconds after which it ends."""


@dataclass(frozen=True, slots=True)
class _Pair:
    """A tower, and plain transformers with the same weights."""

    tower: Tower
    choice: Selection | None
    loads: Sequence[tuple[str, Item, Forward]]
    """One image each, and plain transformers' forward of it."""


class EagerBench:
    """Measures one tower after another into `rows`."""

    def __init__(self, stopwatch: Stopwatch, device: torch.device, *, attention: str, tiny: bool) -> None:
        """`attention` is the server's --attention-backend."""
        self.rows: list[Row] = []
        self._stopwatch, self._device = stopwatch, device
        self._attention, self._tiny = attention, tiny

    def run(self, name: str) -> None:
        """All loads of a tower. Raises what it fails with."""
        if self._stopwatch.is_over:
            self._stopwatch.left_out.append(f"{name}: no time")
            return
        pair = self._other(name) if name in OTHERS else self._qwen(name)
        blocks = fused(pair.tower, pair.choice)
        sys.stderr.write(f"{name}: {blocks} of {len(pair.tower.blocks)} blocks fused\n")
        ran = Columns(pair.tower, name, self._stopwatch, [], 0).measure("eager", Ladder(), {}, {})
        for load, item, stock in pair.loads:
            self.rows.append({"tower": name, "load": load} | self._measured(ran, item, stock))
            sys.stderr.write(f"{self.rows[-1]}\n")

    def _measured(self, ran: Ran, item: Item, stock: Forward) -> Row:
        """Milliseconds until the device is done, the ratio of neighbours, and launches."""
        ours = ran.computed(item)
        ways: Sequence[Callable[[], object]] = (stock, ours, partial(ran.results, [item]))
        warm_ups = self._stopwatch.warm_ups
        rounds = repeated(partial(self._round, ways), _SECONDS, warm_ups=warm_ups, least=_LEAST)
        one, two, three = zip(*rounds, strict=True)
        ratios = quantiles([our / their for their, our, _ in rounds], n=4)
        return {
            "plain_sdpa": round(1e3 * median(one), 3),
            "eager": round(1e3 * median(two), 3),
            "served": round(1e3 * median(three), 3),
            "quartile_1": round(ratios[0], 3),
            "eager_of_plain": round(ratios[1], 3),
            "quartile_3": round(ratios[2], 3),
            "launches_plain": self._launches(stock),
            "launches": self._launches(ours),
            "rounds": len(rounds),
            "norm_error": round(error_of(ran.results([item]), stock().float()), 4),
        }

    def _round(self, ways: Sequence[Callable[[], object]]) -> list[float]:
        """Seconds of each way, from the first launch until the device is done."""
        return [self._seconds(way) for way in ways]

    def _seconds(self, way: Callable[[], object]) -> float:
        start = time.perf_counter()
        way()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter() - start

    def _launches(self, way: Callable[[], object]) -> int:
        """Kernels and copies; on the CPU, operators of torch."""
        return sum(row["calls"] for row in kernel_times(way, self._device))

    def _other(self, name: str) -> _Pair:
        other = shrunk(OTHERS[name]) if self._tiny else OTHERS[name]
        built = random_tower(other, torch.bfloat16, self._device)
        tower = built.tower
        shape = tower.geometry.shapes(other.grid, Modality.IMAGE)[0]
        pixels = torch.randn(shape, dtype=tower.dtype, device=tower.device)
        stock = torch.inference_mode()(other.plain(built.model, [pixels], [other.grid]))
        choice = chosen(tower, self._attention)
        return _Pair(tower, choice, [(size_of(tower, other.grid), item_of(tower, other, pixels), stock)])

    def _qwen(self, name: str) -> _Pair:
        model_type, fields = PUBLISHED[name]
        fields = shrunk_qwen(fields, 2, 128) if self._tiny else fields
        stock, tower = (build(model_type, fields, torch.bfloat16, self._device) for _ in range(2))
        choice = chosen(tower, self._attention)

        def loads() -> Iterator[tuple[str, Item, Forward]]:
            for side in _SIDES:
                grids = [square(tower, side)]
                pixels = draw(tower, grids)
                yield f"{side}^2", items(tower, grids, pixels)[0], partial(plain, stock, pixels, grids)

        return _Pair(tower, choice, list(loads()))
