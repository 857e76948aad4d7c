"""`vitwire bench` against a fake service: what it sends, counts and prints."""

import io
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from threading import Event, Lock
from typing import Any

import grpc
import numpy as np
import pytest
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner, Result

from fake_service import Fake, Running, abort, model_message, serving
from vitwire import Model
from vitwire.model import TileShapes
from vitwire.v1 import encoder_pb2 as pb
from vitwire_cli.app import app
from vitwire_cli.bench import load
from vitwire_cli.bench.capacity import Finding, Verdict
from vitwire_cli.bench.load import Sample
from vitwire_cli.bench.options import Options
from vitwire_cli.bench.report import list_table, rows
from vitwire_cli.bench.results import Run
from vitwire_cli.bench.workload import item_of


def bench(target: str, *arguments: object) -> Result:
    words = ["bench", "--target", target, "--size", "32x40", *map(str, arguments)]
    return CliRunner().invoke(app, words, env={"COLUMNS": "200"})


def document(done: Result) -> dict[str, Any]:
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_the_last_line_is_one_document(running: Running, tmp_path: Path) -> None:
    plot = tmp_path / "latencies.png"
    asked = ("--requests", 12, "--concurrency", 3, "--connections", 2, "--items", 2, "--size", "16x16", "--plot", plot)
    found = document(bench(running.target, *asked))
    assert found["requests"] == 12
    assert (found["items"], found["paths"], found["errors"]) == (24, {"graph": 24}, {})
    assert found["sizes"] == ["32x40", "16x16"]
    assert running.fake.methods.count("Encode") == 15, "a picture of each size, and one to warm up"
    latency = found["latency_ms"]
    assert isinstance(latency, dict)
    assert list(latency) == ["mean", "p50", "p90", "p95", "p99", "max"]
    assert 0 < latency["p50"] <= latency["p90"] <= latency["p99"] <= latency["max"]
    with Image.open(plot) as drawn:
        assert drawn.size == (1400, 560)


def test_what_the_model_makes_of_a_size_is_shown(running: Running) -> None:
    done = bench(running.target, "--requests", 1, "--size", "1600x800", "--size", "8x8")
    assert document(done)["shapes"] == [
        {"size": "32x40", "grid": [1, 10, 8], "tokens": 20},
        {"size": "1600x800", "grid": [1, 10, 22], "tokens": 55},
        {"size": "8x8", "grid": [1, 4, 4], "tokens": 4},
    ]
    assert any("1600x800" in line and "1x10x22" in line and "55" in line for line in done.stdout.splitlines()[:-1])


def test_tables_have_no_gaps_and_no_dicts() -> None:
    last = Run(2.0, [Sample(0.1 * at, 0.1 * at + 0.05, 10, 4, ("graph",), (0.01,)) for at in range(20)], concurrency=8)
    verdicts = [Verdict(8.0, 1.0, 8, 8, None, None, False, "latency"), Verdict(4.0, 1.0, 4, 0, 5.0, 9.0, True, None)]
    finding = Finding(Options(p99_ms=500.0, seconds=1.0), 4.0, "latency", verdicts, last).document()
    for document in (finding, last.document()):
        shown = dict(rows(document | {"rate": None}))
        assert not {"rate", "trials", "for rate", "replicas"} & shown.keys()
        assert not [text for text in shown.values() if "{" in text or "None" in text or text in ("", "-")]
    shown = dict(rows(finding))
    assert shown["confirmation: latency ms"].startswith("mean 50.0, p50 50.0")
    assert shown["confirmation: generator"].startswith("kept pace yes, cpu cores 0.0")
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(list_table(verdicts))
    assert not {"-", "None", "True", "False"} & set(console.export_text().split())


@pytest.mark.parametrize(("count", "turns"), [(1, [[80], [16], [24]]), (2, [[80, 16], [24, 80], [16, 24]])])
def test_sizes_take_turns_over_requests(count: int, turns: list[list[int]], running: Running) -> None:
    sizes = ("--size", "16x16", "--size", "16x24")
    found = document(bench(running.target, *sizes, "--items", count, "--requests", 7, "--concurrency", 1))
    items = [each.pixels for each in running.fake.sent if each.HasField("grid")]  # others are to learn grids
    seen = [[pixels.shape[0] for pixels in items[at : at + count]] for at in range(0, len(items), count)]
    assert seen == [*turns, *turns, *turns, turns[0]][: 3 + 7], "each one to warm up, then seven in turn"
    sent = sum(len(pixels.data) for pixels in items[3 * count :])
    assert isinstance(found["megabytes_per_second"], float)
    assert isinstance(found["seconds"], float)
    assert found["megabytes_per_second"] * found["seconds"] == pytest.approx(sent / 1e6, rel=0.1)


def test_the_time_is_bounded_too(running: Running) -> None:
    found = document(bench(running.target, "--seconds", 0.3))
    assert isinstance(found["requests"], int)
    assert found["requests"] > 0


def test_a_stall_of_the_server_shows_in_the_percentiles() -> None:
    """Sixty requests are due while the server stalls, and wait; back to back, only those in flight would be counted.

    The bounds hold on a slow machine too: whatever else delays a request adds to its latency.
    """
    fake, lock, ends = Fake(), Lock(), list[float]()

    def stall(_: grpc.ServicerContext) -> None:
        if fake.methods.count("Encode") < 20:
            return
        with lock:
            ends[:] = ends or [time.monotonic() + 0.6]
        time.sleep(max(0.0, ends[0] - time.monotonic()))

    fake.before = stall
    with serving(fake) as service:
        found = document(bench(service.target, "--rate", 100, "--arrivals", "uniform", "--requests", 150))
    assert (found["requests"], found["errors"]) == (150, {})
    latency = found["latency_ms"]
    assert isinstance(latency, dict)
    assert latency["max"] > 550
    assert latency["p95"] > 450
    assert latency["p90"] > 350
    assert latency["mean"] > 0.3 * 60 / 150 * 1e3 * 0.9


@pytest.mark.parametrize("form", ["pixels", "picture", "jpeg"])
@pytest.mark.parametrize("repeat", [False, True])
def test_items_differ_each_time_unless_they_are_to_be_cached(repeat: bool, form: str, running: Running) -> None:
    words = ("--requests", 8, "--concurrency", 2, "--as", form, *(["--repeat"] if repeat else []))
    document(bench(running.target, *words))
    seen = [each.pixels.data or each.encoded for each in running.fake.sent]
    if form == "pixels":
        del seen[0]  # a picture, to learn its grid
    assert len(set(seen)) == (1 if repeat else 9)
    assert len(seen) == 9


@pytest.mark.parametrize(
    ("form", "frames"), [("pixels", 0), ("pixels", 5), ("picture", 0), ("picture", 5), ("jpeg", 0)]
)
def test_what_is_sent_for_a_size(form: str, frames: int, running: Running) -> None:
    """Pixels with the grid that the service chose, the picture as it is, or a file of it."""
    found = document(bench(running.target, "--requests", 1, "--as", form, "--frames", frames))
    assert found["as"] == form
    (shape,) = found["shapes"]
    assert (shape["grid"], shape["tokens"]) == ([3 if frames else 1, 10, 8], 60 if frames else 20)
    first, *_, last = running.fake.sent
    assert last.modality == (pb.MODALITY_VIDEO if frames else pb.MODALITY_IMAGE)
    picture = [5, 40, 32, 3] if frames else [40, 32, 3]
    if form == "jpeg":
        with Image.open(io.BytesIO(last.encoded)) as opened:
            assert (opened.format, opened.size) == ("JPEG", (32, 40))
        return
    assert (list(first.pixels.shape), first.HasField("grid")) == (picture, False)
    if form == "pixels":
        grid = last.grid
        assert [grid.t, grid.h, grid.w] == shape["grid"]
        picture = [240, 96] if frames else [80, 48]
    assert (list(last.pixels.shape), last.HasField("grid")) == (picture, form == "pixels")


@pytest.mark.parametrize(
    ("tiles", "grid", "pixels", "crops"),
    [
        (TileShapes((8, 6), None, 0, False, ()), (5, 2, 2), (5, 3, 8, 6), None),
        (TileShapes((8, 8), None, 2, False, ()), (1, 3, 4), (1, 3, 8, 8), None),
        (TileShapes((8, 8), (16, 16), 0, True, ()), (1, 1, 1), (1, 3, 8, 8), (1, 3, 16, 16)),
        (TileShapes((8, 8), (6, 6), 0, False, ()), (7, 2, 3), (1, 3, 8, 8), (6, 3, 6, 6)),
        (TileShapes((8, 8), (6, 6), 0, False, ()), (1, 1, 1), (1, 3, 8, 8), None),
    ],
    ids=["tiles", "margins", "pairs", "overview and crops", "overview"],
)
def test_pixels_of_a_grid_of_tiles(
    tiles: TileShapes, grid: tuple[int, int, int], pixels: tuple[int, ...], crops: tuple[int, ...] | None
) -> None:
    item = item_of(grid, "image", replace(Model.from_message(model_message()), tiles=tiles))
    assert item.pixels is not None
    assert (item.pixels.shape, item.grid) == (pixels, grid)
    assert (None if item.crops is None else item.crops.shape) == crops


@pytest.mark.parametrize("frames", [0, 2])
def test_sizes_need_a_server_that_prepares(frames: int) -> None:
    fake = Fake(change=lambda message: message.prepared.remove(pb.MODALITY_VIDEO if frames else pb.MODALITY_IMAGE))
    with serving(fake) as service:
        done = bench(service.target, "--frames", frames)
    what = "clips" if frames else "pictures"
    reason = f"--size: this server prepares no {what} of qwen3_vl, so that the grid of a size is not known"
    assert (done.exit_code, done.stderr) == (1, f"vitwire: {reason}\n")
    assert fake.methods == ["GetModel"]


def refusing(wanted: Callable[[int], bool]) -> Fake:
    """A service that is full for the Encode calls whose number, from 0, is wanted; the first is to learn a grid."""
    fake = Fake()

    def refuse(context: grpc.ServicerContext) -> None:
        if fake.methods[-1] == "Encode" and wanted(fake.methods.count("Encode") - 1):
            abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED)

    fake.before = refuse
    return fake


@pytest.mark.parametrize(("each", "errors"), [(2, 5), (1, 10)])
def test_errors_are_counted_by_code(each: int, errors: int) -> None:
    """A service that refuses all is an error of the command."""
    with serving(refusing(lambda number: number > 1 and number % each == each - 1)) as service:
        done = bench(service.target, "--requests", 10, "--concurrency", 1)
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["errors"], found["items"]) == ({"RESOURCE_EXHAUSTED": errors}, 10 - errors)
    assert (done.exit_code, done.stderr) == ((1, "vitwire: all 10 requests failed\n") if errors == 10 else (0, ""))


PROGRAM = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
from vitwire_cli import main
main()
"""


@pytest.mark.parametrize(
    ("flags", "answered"), [((), 3), (("--rate", "0.01", "--arrivals", "uniform"), 0), (("--rate", "1e6"), 0)]
)
def test_ctrl_c_tells_at_once_what_was_answered(flags: tuple[str, ...], answered: int) -> None:
    """Neither requests in flight nor the next one, due after 100 s, are waited for."""
    fake, end, numbers = Fake(), Event(), count()

    def hold(_: grpc.ServicerContext) -> None:
        if next(numbers) > 2 + answered:  # after GetModel, the picture, and the request that warms up
            end.wait(60)

    fake.before = hold
    words = ["bench", "--seconds", "100", "--concurrency", "2", "--size", "32x40", *flags]
    with serving(fake) as service:
        command = [sys.executable, "-c", PROGRAM, *words, "--target", service.target]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        in_flight = 2 if answered else 1
        while fake.methods.count("Encode") < 2 + answered + in_flight:
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        try:
            out, err = process.communicate(timeout=50)
        finally:
            process.kill()
            end.set()
    assert (process.returncode, err) == (130, "")
    found = json.loads(out.splitlines()[-1])
    assert (found["requests"], found["errors"]) == (answered, {})


def test_a_rate_beyond_the_generator_ends_and_says_so(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "_BEHIND_SECONDS", 0.2)
    done = bench(running.target, "--rate", 1e9, "--seconds", 0.1)
    found = document(done)
    assert found["limited_by"] == "generator"
    assert "the generator did not keep the rate" in done.stderr


def test_percentiles_are_those_of_what_was_answered() -> None:
    samples = [Sample(number, number + number / 1e3, 1_000_000, 5, ("graph",)) for number in range(101)]
    found = Run(10.0, [*samples, Sample(0.0, 99.0, 1_000_000, error="INTERNAL")]).document()
    latency = found["latency_ms"]
    assert isinstance(latency, dict)
    assert [latency[name] for name in ("p50", "p90", "p95", "p99", "max")] == pytest.approx([50, 90, 95, 99, 100])
    assert latency["mean"] == pytest.approx(np.mean(range(101)))
    assert (found["items_per_second"], found["tokens_per_second"]) == (10.1, 50.5)
    assert found["megabytes_per_second"] == 10.1


def test_a_load_without_a_request_is_an_error(running: Running) -> None:
    done = bench(running.target, "--rate", 0.001, "--seconds", 0.1)
    assert done.exit_code == 1
    assert done.stderr == "vitwire: no request was due: use more --seconds, or a higher --rate\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        *((("--size", size), "WIDTHxHEIGHT") for size in ("0x5", "5", "axb", "5x-1")),
        *((("--rate", rate), "--rate") for rate in ("inf", "nan")),
        (("--arrivals", "uniform"), "needs --rate"),
        (("--concurrency", "100000"), "1024"),
        (("--size", "5x5:0"), "WEIGHT"),
        (("--find-capacity",), "--requests"),
        (("--for-rate", "5"), "--find-capacity"),
        (("--as", "jpeg", "--frames", "2"), "--frames"),
    ],
)
def test_options_that_do_not_fit_are_refused(running: Running, words: tuple[str, ...], message: str) -> None:
    done = bench(running.target, *words, "--requests", 1)
    assert done.exit_code in {1, 2}
    assert message in done.stderr
    assert (done.stdout, running.fake.methods) == ("", [])


@pytest.mark.parametrize(
    ("plot", "message"),
    [
        ("x.nonsense", "suffix"),
        ("x", "suffix"),
        ("nowhere/x.png", "not a directory"),
        ("folder.png", "cannot be written"),
    ],
)
def test_a_plot_that_cannot_be_written_is_refused_before_the_load(
    running: Running, tmp_path: Path, plot: str, message: str
) -> None:
    (tmp_path / "folder.png").mkdir()
    done = bench(running.target, "--requests", 1, "--plot", tmp_path / plot)
    assert (done.exit_code, done.stdout) == (1, "")
    assert message in done.stderr
    assert running.fake.methods == []


def test_a_plot_without_matplotlib_is_refused_before_the_load(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", None)
    done = bench(running.target, "--requests", 1, "--plot", tmp_path / "x.png")
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr == "vitwire: --plot needs matplotlib; in a checkout of Vitwire: pip install '.[plots]'\n"
    assert running.fake.methods == []


def test_figures_are_reported_before_a_plot_fails(running: Running, tmp_path: Path) -> None:
    plot = tmp_path / "x.png"
    running.fake.before = lambda _: plot.mkdir(exist_ok=True)
    done = bench(running.target, "--requests", 2, "--plot", plot)
    assert done.exit_code == 1
    assert json.loads(done.stdout.splitlines()[-1])["items"] == 2
    assert str(plot) in done.stderr
