"""`make gpu-bench`: published vision towers, plain transformers against ours, and the floor of the device.

Weights are random and built on the device. Every time is the device's own (CUDA events), the median of
several batches that run one after the other. Without --towers, three Qwen towers are measured; `--towers others`
measures towers of other makers. The last line of stdout is one JSON document.
"""

import argparse
import gc
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from bench.catalogue import OTHERS
from bench.columns import Columns, fused, ladder_of
from bench.figures import plot
from bench.floor import Ceilings, floor_seconds
from bench.models import PUBLISHED, Load, build, draw, items, plain, shrunk, square, stock
from bench.others import OtherBench
from bench.report import environment, show
from bench.stopwatch import FAILURES, Row, Stopwatch
from rich.console import Console
from transformers.utils.import_utils import is_flash_attn_2_available

from vitwire_server.core.budgets import Ladder
from vitwire_server.runtime.attention.selection import Selection, select
from vitwire_server.runtime.engine import Engine
from vitwire_server.runtime.graphs import GraphSet, SimulatedRecorder
from vitwire_server.runtime.precision.float8 import reduce
from vitwire_server.runtime.precision.similarity import Comparison
from vitwire_server.towers.layouts.packed import PackedTower

SIZES = (224, 448, 1024, 2048)
CLIP_FRAMES = 8
PACKED = {224: 16, 448: 8}
"""Images of a packed batch, by their side."""
TIMES = ("plain_sdpa", "plain_flash", "eager", "graph_stock", "graph_compiled", "graph", "graph_fp8", "floor")
WARM_UPS = 3
SECONDS_EACH = 1.5
"""A measurement ends after this many seconds or after --repeats, but not before three repeats."""
ALL_OTHERS = "others"
_GROUPS = {ALL_OTHERS: tuple(OTHERS)}


def main() -> None:
    options = options_of()
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit(f"gpu-bench: torch {torch.__version__} sees no CUDA device; try --device cpu --tiny")
    bench = Bench(torch.device("cuda:0" if options.device == "cuda" else options.device), options)
    for name in dict.fromkeys(name for given in options.towers for name in _GROUPS.get(given, (given,))):
        bench.run(name)
    console = Console(width=120)
    show(console, "milliseconds of one batch on the device", bench.rows)
    show(console, "milliseconds of one batch on the device, towers of other makers", bench.others)
    show(console, "captures", bench.captures)
    document = bench.document()
    if options.plot:
        plot(options.plot, document, TIMES)
    if options.out:
        options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(document))


class Bench:
    """Measures one tower after another; lists what there was no time for."""

    def __init__(self, device: torch.device, options: argparse.Namespace) -> None:
        self.rows: list[Row] = []
        self.captures: list[Row] = []
        self._device = device
        self._options = options
        self._attention: dict[str, str] = {}
        self._similarity: dict[str, dict[str, float]] = {}
        self._ceilings = Ceilings(options.tflops * 1e12, options.terabytes * 1e12)
        self._stopwatch = Stopwatch(
            device,
            seconds=options.seconds,
            repeats=options.repeats,
            warm_ups=1 if options.tiny else WARM_UPS,
        )
        self._others = OtherBench(self._stopwatch, self.captures, self._ceilings, attention=options.attention)

    @property
    def others(self) -> list[Row]:
        """Rows of towers of other makers."""
        return self._others.rows

    def run(self, name: str) -> None:
        """All loads on one tower; frees its memory afterwards. Its failure does not end the run."""
        try:
            self._other(name) if name in OTHERS else self._qwen(name)
        except FAILURES as error:
            self._stopwatch.failed(name, error)
        if self._device.type == "cuda":
            gc.collect()  # rewritten modules are in cycles
            torch.cuda.empty_cache()

    def _qwen(self, name: str) -> None:
        model_type, fields = PUBLISHED[name]
        fields = shrunk(fields, 2, 128) if self._options.tiny else fields
        tower = build(model_type, fields, torch.bfloat16, self._device)
        loads = self._loads(tower)
        rows = {load.name: self._row(name, tower, load) for load in loads}
        self.rows += rows.values()
        self._plain(tower, loads, rows)
        self._ours(name, tower, loads, rows)

    def _other(self, name: str) -> None:
        if self._stopwatch.is_over:
            self._stopwatch.left_out.append(f"{name}: no time")
            return
        self._attention[name] = self._others.run(name, self._device, tiny=self._options.tiny)

    def document(self) -> Row:
        """All that was measured, and the conditions."""
        cuda = self._device.type == "cuda"
        return {
            "bench": "gpu",
            **environment(),
            "device": torch.cuda.get_device_name(self._device) if cuda else "cpu",
            "graphs": "cuda" if cuda else "simulated",
            "tiny": self._options.tiny,
            "cuda": torch.version.cuda,
            "ceilings": {"tflops": self._options.tflops, "terabytes_per_s": self._options.terabytes},
            "attention": self._attention,
            "fp8_similarity": self._similarity,
            "left_out": self._stopwatch.left_out,
            "rows": self.rows,
            "others": self.others,
            "captures": self.captures,
        }

    def _loads(self, tower: PackedTower) -> list[Load]:
        loads = [Load(f"{side}^2", [square(tower, side)]) for side in self._options.sizes]
        if 224 in self._options.sizes:
            loads.append(Load(f"{CLIP_FRAMES}x224^2 clip", [square(tower, 224, CLIP_FRAMES)]))
        packed = [side for side in PACKED if side in self._options.sizes]
        return loads + [Load(f"{PACKED[side]} x {side}^2", [square(tower, side)] * PACKED[side]) for side in packed]

    def _row(self, name: str, tower: PackedTower, load: Load) -> Row:
        patches = sum(grid.patches for grid in load.grids)
        row: Row = {"tower": name, "load": load.name, "tokens": patches // tower.geometry.merge**2}
        row |= dict.fromkeys(TIMES)
        return row | {"floor": round(1e3 * floor_seconds(tower, load.grids, self._ceilings), 3)}

    def _plain(self, tower: PackedTower, loads: Sequence[Load], rows: dict[str, Row]) -> None:
        """transformers with its own attention; null if the tower does not support flash attention."""
        ways = {"plain_sdpa": "sdpa"}
        if self._device.type == "cuda" and is_flash_attn_2_available():
            ways["plain_flash"] = "flash_attention_2"
        for column, implementation in ways.items():
            with stock(tower, implementation):
                for load in loads:
                    pixels = draw(tower, load.grids)
                    once = partial(self._stopwatch.timed, partial(plain, tower, pixels, load.grids))
                    self._stopwatch.measure(rows[load.name], column, once, SECONDS_EACH)

    def _ours(self, name: str, tower: PackedTower, loads: Sequence[Load], rows: dict[str, Row]) -> None:
        """The server's engine without graphs and with them; a budget for each load, so nothing is padded."""
        choice = select(self._options.attention, self._device, tower.dtype, *tower.attention_heads, captured=True)
        tower.use_attention(choice.implementation)
        self._attention[name] = f"{choice.name}, {choice.reason}"
        columns = Columns(tower, name, self._stopwatch, self.captures, SECONDS_EACH)
        batches = {load.name: items(tower, load.grids, draw(tower, load.grids)) for load in loads}
        ladder = ladder_of(tower, batches.values(), choice)
        ways = ("graph_stock", "graph_compiled") if self._options.compile else ("graph_stock",)
        for column in ways:
            columns.measure(column, ladder, batches, rows)
        sys.stderr.write(f"{name}: {fused(tower, choice)} blocks fused\n")
        for column in ("eager", "graph"):
            columns.measure(column, ladder, batches, rows)
        if self._options.fp8:
            self._similarity[name] = self._reduced(tower, choice, columns)
            columns.measure("graph_fp8", ladder, batches, rows)

    def _reduced(self, tower: PackedTower, choice: Selection, columns: Columns) -> dict[str, float]:
        """Reduce the tower to float8, as the server does; the cosine similarity of its rows to those in bfloat16."""
        engine = Engine(tower, GraphSet(tower, Ladder(), SimulatedRecorder()), columns.stager, columns.streams)
        comparison = Comparison(tower, engine)
        for block in tower.blocks:
            vars(block).pop("forward", None)  # what fuse() replaced
            reduce(block)
        if self._device.type == "cuda":
            from vitwire_server.runtime.fused.fusing import fuse  # noqa: PLC0415 - triton

            fuse(tower.blocks, choice)
        similarities = comparison.similarities()
        return {"least": float(similarities.min()), "median": float(similarities.median())}


def _sizes(text: str) -> list[int]:
    return [int(size) for size in text.split(",")]


def options_of(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of a command line, by default of this process's."""
    parser = argparse.ArgumentParser("gpu-bench", description=__doc__)
    add = parser.add_argument
    add("--device", choices=["cuda", "cpu"], default="cuda", help="cpu simulates graphs: shows that it runs")
    add("--tiny", action="store_true", help="two layers of 128 columns: measures nothing")
    names = [*PUBLISHED, *_GROUPS, *OTHERS]
    listed = f"{', '.join(PUBLISHED)} (these by default); {ALL_OTHERS}, or of those {', '.join(OTHERS)}"
    add("--towers", nargs="+", choices=names, default=list(PUBLISHED), metavar="TOWER", help=listed)
    add("--sizes", type=_sizes, default=list(SIZES), help="sides of images in pixels, as 224,448; of the Qwen towers")
    add("--attention", default="auto", help="the server's --attention-backend")
    add(
        "--compile",
        action="store_true",
        help="also capture compiled blocks, as serve --compile on does; of the Qwen towers",
    )
    add(
        "--fp8",
        action="store_true",
        help="also reduce the towers to float8, as serve --precision fp8 does; of the Qwen towers",
    )
    add("--repeats", type=int, default=30)
    add("--seconds", type=float, default=420, help="nothing new is started after so long")
    add("--tflops", type=float, default=790, help="the device's measured bf16 rate, for the floor")
    add("--terabytes", type=float, default=4.3, help="its measured memory bandwidth per second, for the floor")
    add("--plot", type=Path, help="write a PNG here")
    add("--out", type=Path, help="write the JSON document here as well")
    return parser.parse_args(words)


if __name__ == "__main__":
    main()
