"""`vitwire bench` against a real server: rates, mixes and the search for capacity."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from checkpoints import Checkpoints
from encoded_files import clip, moving
from entered import entered
from servers import ServerProcess, serving

VITWIRE = Path(sys.executable).with_name("vitwire")
FLAGS = ("--graphs", "simulated", "--budgets", "16,64")

server = entered(lambda checkpoints: serving(checkpoints("qwen2_vl"), *FLAGS))


def bench(server: ServerProcess, *words: object) -> subprocess.CompletedProcess[str]:
    command = [VITWIRE, "bench", "--target", server.target, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)


def document(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_mix_at_a_rate(server: ServerProcess, tmp_path: Path) -> None:
    mix = ("--size", "112x112:3", "--size", "56x168:1")
    plot = tmp_path / "latency.svg"
    first = document(bench(server, *mix, "--rate", 40, "--requests", 60, "--plot", plot))
    assert (first["requests"], first["errors"], first["arrivals"]) == (60, {}, "poisson")
    assert first["seconds"] > 0.7, "60 requests at 40 per second take 1.5 s on average"
    assert first["paths"] == {"graph": 60}
    assert plot.read_text().startswith("<?xml")


@pytest.mark.parametrize(
    "model_type",
    [*(pytest.param(each, marks=pytest.mark.matrix) for each in ("deepseek_ocr2", "deepseek_vl_hybrid")), "internvl"],
)
def test_towers_of_tiles(model_type: str, checkpoints: Checkpoints) -> None:
    """With crops, with pairs, and with clips: pixels have the shapes that the server gives pictures."""
    with serving(checkpoints(model_type), *FLAGS) as server:
        sizes = ("--size", "500x300", "--size", "90x90")
        shapes = {
            form: document(bench(server, *sizes, "--requests", 2, "--as", form))["shapes"]
            for form in ("pixels", "picture", "jpeg")
        }
        assert shapes["pixels"] == shapes["picture"] == shapes["jpeg"]
        if model_type == "internvl":
            assert document(bench(server, "--size", "90x90", "--frames", 3, "--requests", 1))["errors"] == {}


def test_a_clip(server: ServerProcess, tmp_path: Path) -> None:
    """Each copy is decoded and encoded: no cache answers."""
    (path := tmp_path / "film.mp4").write_bytes(clip(moving(20)))
    first = document(bench(server, "--clip", path, "--requests", 4, "--items", 2))
    assert (first["requests"], first["errors"], first["clip"]) == (4, {}, str(path))
    assert first["shapes"] == [{"size": str(path), "grid": [2, 20, 28], "tokens": 280}]
    assert 0 < first["first_rows_ms"]["p50"] <= first["latency_ms"]["p50"]
    assert "cache" not in first["paths"]
    assert sum(first["paths"].values()) == 8
    wrong = bench(server, "--clip", path, "--size", "56x56")
    assert (wrong.returncode, "--clip" in wrong.stderr) == (2, True)
    missing = bench(server, "--clip", tmp_path / "none.mp4")
    assert (missing.returncode, "--clip: [Errno 2]" in missing.stderr) == (2, True)
    assert "is not an MP4, WebM" in bench(server, "--clip", __file__).stderr


def test_a_generator_without_free_threads_counts_what_it_could_not_send(server: ServerProcess) -> None:
    done = bench(server, "--size", "448x448", "--rate", 2000, "--seconds", 1, "--concurrency", 1)
    found = document(done)
    assert found["errors"]["NOT_SENT"] > 0
    assert found["requests"] > 1500, "all that were due count"
    assert found["generator"]["in_flight_max"] == 1
    assert found["limited_by"] in {"concurrency", "generator"}
    assert "--concurrency" in done.stderr or "generator" in done.stderr


@pytest.mark.matrix
@pytest.mark.timeout(600)
def test_the_capacity_is_found_and_confirmed(server: ServerProcess, tmp_path: Path) -> None:
    """The aim is generous: ten times the slowest request of a server that has nothing else to do."""
    plot = tmp_path / "trials.svg"
    size = ("--size", "56x56", "--timeout", 30)
    alone = document(bench(server, *size, "--requests", 30, "--concurrency", 1))
    aim = min(1000, max(250, round(10 * alone["latency_ms"]["max"])))
    done = bench(
        server, *size, "--find-capacity", "--p99-ms", aim, "--seconds", 0.2, "--for-rate", 1000, "--plot", plot
    )
    found = document(done)
    trials, capacity = found["trials"], found["capacity"]
    assert capacity is not None, done.stderr
    assert [(each["rate"], each["holds"]) for each in trials[-3:]] == [(capacity, True)] * 3
    assert all(each["missed"] <= 0.01 * each["requests"] for each in trials if each["holds"])
    failed = [each for each in trials if not each["holds"]]
    assert failed, "no server answers a million requests a second"
    assert all(each["missed"] > 0.01 * each["requests"] for each in failed)
    lowest = min(failed, key=lambda each: each["rate"])
    assert capacity < lowest["rate"] <= capacity * 1.0501, "known within 5 %"
    assert found["limited_by"] in [each["limited_by"] for each in failed if each["rate"] == lowest["rate"]]
    assert 1000 <= found["replicas"] * capacity * 0.7 < 1000 + capacity
    assert plot.read_text().startswith("<?xml")
