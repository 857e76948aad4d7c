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
from bench.beside_vllm import beside
from bench.catalogue import OTHERS
from bench.commands import ClientFailed
from bench.engine.checkpoint import write_tower
from bench.engine.loads import Size
from bench.engine.towers.vitwire_tower import VitwireTower
from bench.floor import Ceilings, floor_seconds
from bench.kernels import by_group, kernel_times
from bench.models import PUBLISHED, build, draw, items, plain, shrunk, square
from bench.other_towers import other_loads
from bench.random_towers import random_tower
from bench.random_towers import shrunk as shrunk_other
from bench.report import environment, show
from bench.stopwatch import FAILURES, Row, Stopwatch
from bench.tower_times import COLUMNS, Ran, TowerLoad, TowerTimes
from rich.console import Console

from vitwire_server.towers.layouts.packed import PackedTower
from vitwire_server.towers.tower import Tower

SIZES = (224, 448, 1024, 2048)
CLIP_FRAMES = 8
PACKED = {224: 16, 448: 8}
"""Images of a packed batch, by their side."""
WARM_UPS = 3
SECONDS_EACH, OTHER_SECONDS_EACH = 1.5, 0.8
"""A measurement ends after this many seconds or after --repeats, but not before three repeats."""
_KERNELS = 12
"""Kernels of each replay that are printed, at most."""
ALL_OTHERS = "others"


def main() -> None:
    options = options_of()
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit(f"gpu-bench: torch {torch.__version__} sees no CUDA device; try --device cpu --tiny")
    if options.device == "cuda":
        torch.set_num_threads(1)  # as the server: it copies into pinned memory
    bench = Bench(torch.device("cuda:0" if options.device == "cuda" else options.device), options)
    for name in options.towers:
        for each in OTHERS if name == ALL_OTHERS else (name,):
            bench.run(each)
    console = Console(width=120)
    show(console, "milliseconds of one batch on the device", bench.rows)
    show(console, "milliseconds of a forward beside vLLM's tower", bench.vllm)
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

    def run(self, name: str) -> None:
        """All loads on one tower; frees its memory afterwards. Its failure does not end the run."""
        try:
            self._other(name) if name in OTHERS else self._qwen(name)
        except FAILURES as error:
            self._stopwatch.failed(name, error)
        if self._device.type == "cuda":
            gc.collect()  # rewritten modules are in cycles
            torch.cuda.empty_cache()

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
            "vllm_engine": self._vllm_engine,
            "vllm": self.vllm,
            "profiles": self.profiles,
            "captures": self.captures,
        }

    def _other(self, name: str) -> None:
        if not self._has_time(name):
            return
        other = shrunk_other(OTHERS[name]) if self._options.tiny else OTHERS[name]
        built = random_tower(other, torch.bfloat16, self._device)
        loads = other_loads(name, other, built, self._ceilings, self._stopwatch)
        self._measured(name, built.tower, loads, OTHER_SECONDS_EACH)

    def _qwen(self, name: str) -> None:
        model_type, fields = PUBLISHED[name]
        fields = shrunk(fields, 2, 128) if self._options.tiny else fields
        tower = build(model_type, fields, torch.bfloat16, self._device)
        loads = [self._load(name, tower, *each) for each in _sizes_of(self._options.sizes).items()]
        with tempfile.TemporaryDirectory(prefix="gpu-bench-") as folder:
            beside_vllm = self._options.vllm and model_type == "qwen3_vl"
            if beside_vllm:
                write_tower(Path(folder), tower.model)
            ran = self._measured(name, tower, loads, SECONDS_EACH)
            if beside_vllm and self._has_time(f"{name} vllm"):
                self._beside(name, VitwireTower(tower, ran, folder))
        if self._options.profile:
            self._profile(name, ran, loads)

    def _load(self, name: str, tower: PackedTower, load: str, size: Size) -> TowerLoad:
        grids = [square(tower, size.side, size.frames)] * size.images
        pixels = draw(tower, grids)
        batch = items(tower, grids, pixels)
        row: Row = {"tower": name, "load": load, "rows": sum(item.rows for item in batch), **dict.fromkeys(COLUMNS)}
        row["floor"] = round(1e3 * floor_seconds(tower, grids, self._ceilings), 3)
        return TowerLoad(row, batch, partial(plain, tower, pixels, grids))

    def _measured(self, name: str, tower: Tower, loads: Sequence[TowerLoad], seconds: float) -> Ran:
        """Plain transformers and our engine, with a budget for each load, so that nothing is padded."""
        self.rows += [load.row for load in loads]
        times = TowerTimes(name, tower, self._stopwatch, self.captures, seconds)
        ran, self._attention[name] = times.measure(loads, self._options.attention)
        return ran

    def _has_time(self, what: str) -> bool:
        if self._stopwatch.is_over:
            self._stopwatch.left_out.append(f"{what}: no time")
        return not self._stopwatch.is_over

    def _profile(self, name: str, ran: Ran, loads: Sequence[TowerLoad]) -> None:
        for load in loads:
            what = f"{name} {load.row['load']}"
            try:
                if replay := ran.replay(load.items):
                    self.profiles[what] = kernel_times(replay, self._device)
            except FAILURES as error:
                self._stopwatch.failed(f"{what} profile", error)

    def _beside(self, name: str, ours: VitwireTower) -> None:
        """Rows as they are measured; what fails is left out."""
        sizes, left_out = _sizes_of(self._options.sizes), self._stopwatch.left_out

        def skip(what: str, why: str) -> None:
            if (line := f"{name} {what}: {why}") not in left_out:
                left_out.append(line)
                sys.stderr.write(f"left out: {line}\n")

        left, note = lambda: self._stopwatch.left, self._vllm_engine.update
        try:
            for row in beside(ours, sizes, self._options.vllm, left, skip, note):
                self.vllm.append({"tower": name} | row)
                sys.stderr.write(f"{self.vllm[-1]}\n")
        except (ClientFailed, *FAILURES) as error:
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
    names = [*PUBLISHED, ALL_OTHERS, *OTHERS]
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
