"""`make gpu-bench`: published vision towers, plain transformers against ours, and the floor of the device.

Weights are random and built on the device. Every time is the device's own (CUDA events), the median of
several batches that run one after the other. The last line of stdout is one JSON document.
"""

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from bench.floor import Ceilings, floor_seconds
from bench.models import PUBLISHED, Load, build, draw, items, plain, preprocessing, shrunk, square, stock
from rich.console import Console
from rich.table import Table
from transformers.utils import is_flash_attn_2_available

from vitwire_server.core.budgets import Budget, Ladder, budget, with_shorter
from vitwire_server.core.errors import EncodeFailed
from vitwire_server.core.items import Item, total
from vitwire_server.runtime.attention.selection import Selection, select
from vitwire_server.runtime.engine import Engine
from vitwire_server.runtime.float8 import reduce
from vitwire_server.runtime.graphs import CudaRecorder, GraphSet, Recorder, SimulatedRecorder
from vitwire_server.runtime.similarity import Comparison
from vitwire_server.runtime.staging import Stager
from vitwire_server.runtime.streams import CudaStreams, HostStreams, Streams
from vitwire_server.towers.layouts.packed import PackedTower

SIZES = (224, 448, 1024, 2048)
CLIP_FRAMES = 8
PACKED = {224: 16, 448: 8}
"""Images of a packed batch, by their side."""
ITEMS, FRAMES = 64, 512
TIMES = ("plain_sdpa", "plain_flash", "eager", "graph_stock", "graph_compiled", "graph", "graph_fp8", "floor")
WARM_UPS = 3
SECONDS_EACH = 1.5
"""A measurement ends after this many repeats or seconds, but not before three repeats."""
Row = dict[str, Any]


def main() -> None:
    options = _parser().parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit(f"gpu-bench: torch {torch.__version__} sees no CUDA device; try --device cpu --tiny")
    bench = Bench(torch.device(options.device, 0 if options.device == "cuda" else None), options)
    for name in options.towers:
        bench.run(name)
    console = Console(width=120)
    _show(console, "milliseconds of one batch on the device", bench.rows)
    _show(console, "captures", bench.captures)
    if options.plot:
        _plot(options.plot, bench)
    document = {"bench": "gpu", **bench.parameters(), "rows": bench.rows, "captures": bench.captures}
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
        self._left_out: list[str] = []
        self._similarity: dict[str, dict[str, float]] = {}
        self._until = time.monotonic() + options.seconds

    def run(self, name: str) -> None:
        """All loads on one tower; frees its memory afterwards."""
        model_type, fields = PUBLISHED[name]
        fields = shrunk(fields, 2, 128) if self._options.tiny else fields
        tower = build(model_type, fields, torch.bfloat16, self._device)
        loads = self._loads(tower)
        ceilings = Ceilings(self._options.tflops * 1e12, self._options.terabytes * 1e12)
        rows = {load.name: self._row(name, tower, load, ceilings) for load in loads}
        self._plain(tower, loads, rows)
        self._ours(name, tower, loads, rows)
        self.rows += rows.values()
        del tower
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def parameters(self) -> Row:
        """The conditions of the measurement."""
        cuda = self._device.type == "cuda"
        return {
            "date": datetime.now(UTC).date().isoformat(),
            "device": torch.cuda.get_device_name(self._device) if cuda else "cpu",
            "graphs": "cuda" if cuda else "simulated",
            "tiny": self._options.tiny,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "transformers": transformers.__version__,
            "ceilings": {"tflops": self._options.tflops, "terabytes_per_s": self._options.terabytes},
            "attention": self._attention,
            "fp8_similarity": self._similarity,
            "left_out": self._left_out,
        }

    def _loads(self, tower: PackedTower) -> list[Load]:
        loads = [Load(f"{side}^2", [square(tower, side)]) for side in self._options.sizes]
        if 224 in self._options.sizes:
            loads.append(Load(f"{CLIP_FRAMES}x224^2 clip", [square(tower, 224, CLIP_FRAMES)]))
        packed = [side for side in PACKED if side in self._options.sizes]
        return loads + [Load(f"{PACKED[side]} x {side}^2", [square(tower, side)] * PACKED[side]) for side in packed]

    def _row(self, name: str, tower: PackedTower, load: Load, ceilings: Ceilings) -> Row:
        patches = sum(grid.patches for grid in load.grids)
        row: Row = {"tower": name, "load": load.name, "tokens": patches // tower.geometry.merge**2}
        row |= dict.fromkeys(TIMES)
        return row | {"floor": round(1e3 * floor_seconds(tower, load.grids, ceilings), 3)}

    def _plain(self, tower: PackedTower, loads: Sequence[Load], rows: dict[str, Row]) -> None:
        """transformers with its own attention; null if the tower does not support flash attention."""
        ways = {"plain_sdpa": "sdpa"}
        if self._device.type == "cuda" and is_flash_attn_2_available():
            ways["plain_flash"] = "flash_attention_2"
        for column, implementation in ways.items():
            with stock(tower, implementation):
                for load in loads:
                    pixels = draw(tower, load.grids)
                    once = partial(self._timed, partial(plain, tower, pixels, load.grids))
                    self._measure(rows[load.name], column, once)

    def _ours(self, name: str, tower: PackedTower, loads: Sequence[Load], rows: dict[str, Row]) -> None:
        """The server's engine without graphs and with them; a budget for each load, so nothing is padded."""
        choice = select(self._options.attention, self._device, tower.dtype, *tower.attention_heads, captured=True)
        tower.use_attention(choice.implementation)
        self._attention[name] = f"{choice.name}, {choice.reason}"
        streams: Streams = CudaStreams(self._device) if self._device.type == "cuda" else HostStreams()
        batches = {load.name: items(tower, load.grids, draw(tower, load.grids)) for load in loads}
        ladder = _ladder(tower, batches.values(), choice)
        ways = ("graph_stock", "graph_compiled") if self._options.compile else ("graph_stock",)
        for column in ways:
            self._column(name, column, tower, ladder, batches, rows, streams)
        rewritten = fused(tower, choice)
        sys.stderr.write(f"{name}: {rewritten} blocks fused\n")
        for column in ("eager", "graph"):
            self._column(name, column, tower, ladder, batches, rows, streams)
        if self._options.fp8:
            self._similarity[name] = self._reduced(tower, choice, streams)
            self._column(name, "graph_fp8", tower, ladder, batches, rows, streams)

    def _reduced(self, tower: PackedTower, choice: Selection, streams: Streams) -> dict[str, float]:
        """Reduce the tower to float8, as the server does; the cosine similarity of its rows to those in bfloat16."""
        engine = Engine(tower, GraphSet(tower, Ladder(), SimulatedRecorder()), self._stager(tower), streams)
        comparison = Comparison(tower, engine)
        for block in tower.blocks:
            vars(block).pop("forward", None)  # what fuse() replaced
            reduce(block)
        if self._device.type == "cuda":
            from vitwire_server.runtime.fused_float8 import fuse_float8  # noqa: PLC0415 - triton

            fuse_float8(tower.blocks, choice)
        similarities = comparison.similarities()
        return {"least": float(similarities.min()), "median": float(similarities.median())}

    def _stager(self, tower: PackedTower) -> Stager:
        return Stager(tower.geometry, preprocessing(), self._device)

    def _column(
        self,
        name: str,
        column: str,
        tower: PackedTower,
        ladder: Ladder,
        batches: dict[str, list[Item]],
        rows: dict[str, Row],
        streams: Streams,
    ) -> None:
        graphs = self._captured(name, column, tower, ladder if column != "eager" else Ladder(), streams)
        engine = Engine(tower, graphs, self._stager(tower), streams)
        for load, batch in batches.items():
            fitting = graphs.ladder.smallest_fitting(total([item.footprint for item in batch]), len(batch))
            if column == "eager" or fitting:
                self._measure(rows[load], column, partial(_execute, engine, batch, fitting))
            else:
                self._left_out.append(f"{name} {load} {column}: no graph")

    def _captured(self, name: str, column: str, tower: PackedTower, ladder: Ladder, streams: Streams) -> GraphSet:
        recorder: Recorder = CudaRecorder(streams.compute) if isinstance(streams, CudaStreams) else SimulatedRecorder()
        compiled: Any = nullcontext()
        if column == "graph_compiled":
            from vitwire_server.runtime.compiling import compiled_blocks  # noqa: PLC0415 - triton, only if asked for

            compiled = compiled_blocks(tower)
        with compiled:
            graphs = GraphSet(tower, ladder, recorder, lambda budgets: self._watched(name, column, budgets))
        self._left_out += [f"{name} {each.tokens} tokens {column}: {why}" for each, why in graphs.dropped.items()]
        return graphs

    def _watched(self, name: str, column: str, budgets: Iterable[Budget]) -> Iterator[Budget]:
        """Seconds and memory of each capture, until the time is up."""
        for each in budgets:
            if time.monotonic() > self._until:
                self._left_out.append(f"{name} {each.tokens} tokens {column}: no time to capture")
                continue
            start, before = time.perf_counter(), self._reserved()
            yield each
            took = {"seconds": round(time.perf_counter() - start, 3), "megabytes": None}
            if self._device.type == "cuda":
                took["megabytes"] = round((self._reserved() - before) / 1e6, 1)
            self.captures.append({"tower": name, "column": column, "budget": each.tokens, **took})

    def _reserved(self) -> int:
        return torch.cuda.memory_reserved(self._device) if self._device.type == "cuda" else 0

    def _measure(self, row: Row, column: str, once: Callable[[], float]) -> None:
        """The median of `once` in milliseconds; null if the time is up or it fails."""
        where = f"{row['tower']} {row['load']} {column}"
        if time.monotonic() > self._until:
            self._left_out.append(f"{where}: no time")
            return
        try:
            taken = self._repeated(once)
        except torch.AcceleratorError as error:
            self._until = 0.0  # the device is lost; report what was measured so far
            self._left_out.append(f"{where}: {error}")
        except (RuntimeError, ImportError, ValueError, TypeError, EncodeFailed) as error:
            self._left_out.append(f"{where}: {str(error).partition(chr(10))[0]}")
        else:
            row[column] = round(1e3 * median(taken), 3)
            sys.stderr.write(f"{where}: {row[column]} ms\n")

    def _repeated(self, once: Callable[[], float]) -> list[float]:
        for _ in range(1 if self._options.tiny else WARM_UPS):
            once()
        taken: list[float] = []
        end = time.monotonic() + SECONDS_EACH
        while len(taken) < 3 or (len(taken) < self._options.repeats and time.monotonic() < end):
            taken.append(once())
        return taken

    def _timed(self, run: Callable[[], object]) -> float:
        """Seconds between events around a call, with nothing else running."""
        if self._device.type != "cuda":
            start = time.perf_counter()
            run()
            return time.perf_counter() - start
        started, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        started.record()
        run()
        done.record()
        done.synchronize()
        return float(started.elapsed_time(done)) / 1e3


def _ladder(tower: PackedTower, batches: Collection[Sequence[Item]], choice: Selection) -> Ladder:
    """A budget as the server makes it for each batch, with slots for all of the batch's segments."""
    budgets: dict[int, Budget] = {}
    for batch in batches:
        load = total([item.footprint for item in batch])
        own = budget(load.tokens, merge=tower.geometry.merge, max_items=ITEMS, max_frames=FRAMES)
        before = budgets.get(load.tokens, own)
        budgets[load.tokens] = replace(
            own,
            max_items=max(before.max_items, len(batch)),
            max_segments=max(before.max_segments, load.segments),
        )
    ladder = with_shorter(Ladder(tuple(sorted(budgets.values()))), choice.shorter, merge=tower.geometry.merge)
    loads = [(total([item.footprint for item in batch]), len(batch)) for batch in batches]
    return Ladder(tuple(sorted({fitting for load in loads if (fitting := ladder.smallest_fitting(*load))})))


def fused(tower: PackedTower, choice: Selection) -> int:
    """Fuse the tower as at load on CUDA."""
    tower.rewrite()
    if tower.device.type != "cuda":
        return 0
    from vitwire_server.runtime.fused import fuse_tower  # noqa: PLC0415 - triton

    return fuse_tower(tower, choice)


def _execute(engine: Engine, batch: Sequence[Item], fitting: Budget | None) -> float:
    """Seconds on the device, as the server reports them: staging, metadata, forward, copies of the rows."""
    collected = engine.launch(batch, fitting).collect()
    failure = next((result for result in collected.results if isinstance(result, Exception)), None)
    if failure or not collected.timings:
        raise failure or RuntimeError("nothing ran")
    return collected.timings.execute


def _show(console: Console, title: str, rows: Sequence[Row]) -> None:
    if not rows:
        return
    table = Table(*(name.replace("_", "\n") for name in rows[0]), title=title, title_justify="left")
    for row in rows:
        table.add_row(*("-" if value is None else str(value) for value in row.values()))
    console.print(table)


def _plot(path: Path, bench: Bench) -> None:
    """One panel per tower, one group of bars per load, milliseconds on a logarithmic axis."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - an optional dependency

    names = list(dict.fromkeys(row["tower"] for row in bench.rows))
    figure = Figure(figsize=(11, 3.2 * len(names)), layout="constrained")
    shown = [column for column in TIMES if any(row[column] is not None for row in bench.rows)]
    for name, axes in zip(names, figure.subplots(len(names), squeeze=False)[:, 0], strict=True):
        rows = [row for row in bench.rows if row["tower"] == name]
        width = 0.8 / len(shown)
        for number, column in enumerate(shown):
            heights = [row[column] or float("nan") for row in rows]
            axes.bar([x + number * width for x in range(len(rows))], heights, width, label=column.replace("_", " "))
        axes.set_xticks([x + 0.4 - width / 2 for x in range(len(rows))], [row["load"] for row in rows])
        axes.set(title=name, ylabel="ms", yscale="log")
    axes.legend(ncols=len(shown))
    parameters = bench.parameters()
    figure.suptitle(
        f"{parameters['device']}, torch {parameters['torch']}, graphs {parameters['graphs']}, {parameters['date']}"
    )
    figure.savefig(path, dpi=140)


def _sizes(text: str) -> list[int]:
    return [int(size) for size in text.split(",")]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("gpu-bench", description=__doc__)
    add = parser.add_argument
    add("--device", choices=["cuda", "cpu"], default="cuda", help="cpu simulates graphs: shows that it runs")
    add("--tiny", action="store_true", help="two layers of 128 columns: measures nothing")
    add("--towers", nargs="+", choices=list(PUBLISHED), default=list(PUBLISHED))
    add("--sizes", type=_sizes, default=list(SIZES), help="sides of images in pixels, as 224,448")
    add("--attention", default="auto", help="the server's --attention-backend")
    add("--compile", action="store_true", help="also capture compiled blocks, as serve --compile on does")
    add("--fp8", action="store_true", help="also reduce the towers to float8, as serve --precision fp8 does")
    add("--repeats", type=int, default=30)
    add("--seconds", type=float, default=420, help="nothing new is started after so long")
    add("--tflops", type=float, default=790, help="the device's measured bf16 rate, for the floor")
    add("--terabytes", type=float, default=4.3, help="its measured memory bandwidth per second, for the floor")
    add("--plot", type=Path, help="write a PNG here")
    add("--out", type=Path, help="write the JSON document here as well")
    return parser


if __name__ == "__main__":
    main()
