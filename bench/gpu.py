"""`make gpu-bench`: published vision towers, plain transformers against ours, and the floor of the device.

Weights are random and built on the device. Every time is the device's own (CUDA events), the median of
several batches that run one after the other. Without --towers, three Qwen towers are measured; `--towers others`
measures towers of other makers, `--vllm` vLLM's tower beside ours. The last line of stdout is one JSON document.
"""

import argparse
import gc
import json
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from bench.beside_vllm import AIM, beside
from bench.catalogue import OTHERS
from bench.engine.checkpoint import write_tower
from bench.engine.loads import Size
from bench.engine.towers.tower_process import TowerEnded
from bench.engine.towers.vitwire_tower import Loaded
from bench.engine_times import Batches, EngineTimes, Ran
from bench.floor import Ceilings, floor_seconds
from bench.kernels import by_group, kernel_times
from bench.models import PUBLISHED, Load, build, draw, items, plain, preprocessing, shrunk, square, stock
from bench.other_towers import OtherBench
from bench.random_towers import shrunk as shrunk_other
from bench.report import environment, show
from bench.stopwatch import FAILURES, Row, Stopwatch
from rich.console import Console

from vitwire_server.core.items import DType
from vitwire_server.runtime.attention.selection import select
from vitwire_server.towers.layouts.packed import PackedTower

SIZES = (224, 448, 1024, 2048)
CLIP_FRAMES = 8
PACKED = {224: 16, 448: 8}
"""Images of a packed batch, by their side."""
TIMES = ("plain_sdpa", "eager", "graph_stock", "graph", "floor")
WARM_UPS = 3
SECONDS_EACH = 1.5
"""A measurement ends after this many seconds or after --repeats, but not before three repeats."""
_KERNELS = 12
"""Kernels of each replay that are printed, at most."""
ALL_OTHERS = "others"
_GROUPS = {ALL_OTHERS: tuple(OTHERS)}


def main() -> None:
    options = options_of()
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit(f"gpu-bench: torch {torch.__version__} sees no CUDA device; try --device cpu --tiny")
    if options.device == "cuda":
        torch.set_num_threads(1)  # as the server: it copies into pinned memory
    bench = Bench(torch.device("cuda:0" if options.device == "cuda" else options.device), options)
    for name in dict.fromkeys(name for given in options.towers for name in _GROUPS.get(given, (given,))):
        bench.run(name)
    console = Console(width=120)
    show(console, "milliseconds of one batch on the device", bench.rows)
    show(console, "milliseconds of one batch on the device, towers of other makers", bench.others)
    show(console, f"milliseconds of a forward beside vLLM's tower, whose time should be {AIM} times ours", bench.vllm)
    for load, rows in bench.profiles.items():
        show(console, f"one replay: {load}", [*by_group(rows), *rows[:_KERNELS]])
    show(console, "captures", bench.captures)
    document = bench.document()
    if options.out:
        options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(document))


class Bench:
    """Measures one tower after another; lists what there was no time for."""

    def __init__(self, device: torch.device, options: argparse.Namespace) -> None:
        self.rows: list[Row] = []
        self.captures: list[Row] = []
        self.vllm: list[Row] = []
        self._vllm_engine: Row = {}
        self.profiles: dict[str, list[Row]] = {}
        """Kernels of one replay, by tower and load."""
        self._device = device
        self._options = options
        self._attention: dict[str, str] = {}
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
        sizes = _sizes_of(self._options.sizes)
        loads = [Load(load, [square(tower, each.side, each.frames)] * each.images) for load, each in sizes.items()]
        rows = {load.name: self._row(name, tower, load) for load in loads}
        self.rows += rows.values()
        with tempfile.TemporaryDirectory(prefix="gpu-bench-") as folder:
            checkpoint = folder if self._options.vllm and model_type == "qwen3_vl" else ""
            if checkpoint:
                write_tower(Path(checkpoint), tower.model)
            self._plain(tower, loads, rows)
            self._ours(name, tower, loads, rows, checkpoint)

    def _other(self, name: str) -> None:
        if not self._has_time(name):
            return
        other = shrunk_other(OTHERS[name]) if self._options.tiny else OTHERS[name]
        self._attention[name] = self._others.run(name, other, self._device)

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
            "left_out": self._stopwatch.left_out,
            "rows": self.rows,
            "others": self.others,
            "vllm_engine": self._vllm_engine,
            "vllm": self.vllm,
            "profiles": self.profiles,
            "captures": self.captures,
        }

    def _row(self, name: str, tower: PackedTower, load: Load) -> Row:
        patches = sum(grid.patches for grid in load.grids)
        row: Row = {"tower": name, "load": load.name, "tokens": patches // tower.geometry.merge**2}
        row |= dict.fromkeys(TIMES)
        return row | {"floor": round(1e3 * floor_seconds(tower, load.grids, self._ceilings), 3)}

    def _plain(self, tower: PackedTower, loads: Sequence[Load], rows: dict[str, Row]) -> None:
        """transformers with its own attention."""
        with stock(tower, "sdpa"):
            for load in loads:
                once = partial(plain, tower, draw(tower, load.grids), load.grids)
                timed = partial(self._stopwatch.timed, once)
                self._stopwatch.measure(rows[load.name], "plain_sdpa", timed, SECONDS_EACH)

    def _ours(
        self, name: str, tower: PackedTower, loads: Sequence[Load], rows: dict[str, Row], checkpoint: str
    ) -> None:
        """The server's engine without graphs and with them; a budget for each load, so nothing is padded."""
        choice = select(self._options.attention, self._device, tower.dtype, *tower.attention_heads, captured=True)
        tower.use_attention(choice.implementation)
        self._attention[name] = f"{choice.name}, {choice.reason}"
        times = EngineTimes(tower, name, self._stopwatch, self.captures, SECONDS_EACH)
        batches = {load.name: items(tower, load.grids, draw(tower, load.grids)) for load in loads}
        *_, (_, ran) = times.measured(batches, rows, choice)
        if checkpoint and self._has_time(f"{name} vllm"):
            plan, dtype = ran.plan, DType.BFLOAT16
            self._vllm(name, Loaded(tower, ran.engine, plan, preprocessing(), dtype, checkpoint))
        if self._options.profile:
            self._profile(name, ran, batches)

    def _has_time(self, what: str) -> bool:
        if self._stopwatch.is_over:
            self._stopwatch.left_out.append(f"{what}: no time")
        return not self._stopwatch.is_over

    def _profile(self, name: str, ran: Ran, batches: Batches) -> None:
        for load, batch in batches.items():
            try:
                if replay := ran.replay(batch):
                    self.profiles[f"{name} {load}"] = kernel_times(replay, self._device)
            except FAILURES as error:
                self._stopwatch.failed(f"{name} {load} profile", error)

    def _vllm(self, name: str, loaded: Loaded) -> None:
        """Rows as they are measured; what fails is left out."""
        sizes, left_out = _sizes_of(self._options.sizes), self._stopwatch.left_out

        def skip(what: str, why: str) -> None:
            if (line := f"{name} {what}: {why}") not in left_out:
                left_out.append(line)
                sys.stderr.write(f"left out: {line}\n")

        left, note = lambda: self._stopwatch.left, self._vllm_engine.update
        try:
            for row in beside(loaded, sizes, self._options.vllm, left, skip, note):
                self.vllm.append({"tower": name} | row)
                sys.stderr.write(f"{self.vllm[-1]}\n")
        except (TowerEnded, *FAILURES) as error:
            sys.stderr.write(f"{error}\n")
            self._stopwatch.failed(f"{name} vllm", error)


def _sizes_of(sides: Sequence[int]) -> dict[str, Size]:
    """The pictures of each load."""
    sizes = {f"{side}^2": Size(side) for side in sides}
    if 224 in sides:
        sizes[f"{CLIP_FRAMES}x224^2 clip"] = Size(224, frames=CLIP_FRAMES)
    packed = {side: images for side, images in PACKED.items() if side in sides}
    return sizes | {f"{images} x {side}^2": Size(side, images) for side, images in packed.items()}


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
    vllm = "also vLLM's tower, of Qwen3-VL: the interpreter that has vLLM (default: this one) or a folder of packages"
    add("--vllm", nargs="?", const=sys.executable, metavar="PYTHON", help=vllm)
    add("--profile", action="store_true", help="also the time of each kernel of one replay; of the Qwen towers")
    add("--repeats", type=int, default=30)
    add("--seconds", type=float, default=420, help="nothing new is started after so long")
    add("--tflops", type=float, default=790, help="the device's measured bf16 rate, for the floor")
    add("--terabytes", type=float, default=4.3, help="its measured memory bandwidth per second, for the floor")
    add("--out", type=Path, help="write the JSON document here as well")
    return parser.parse_args(words)


if __name__ == "__main__":
    main()
