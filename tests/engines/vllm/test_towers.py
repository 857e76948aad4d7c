"""`make engine-bench FLAGS=--towers` but for the GPU: vLLM's tower and its budgets, the server's, and float32."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from bench.engine import checkpoint, command
from bench.engine.towers import measuring

from servers import PYTHON

SIZES = ["256x1", "128x4", "128x1"]
SIMULATED = ["-m", "tests.engines.vllm.simulated_graphs"]
TOWERS = ["vllm_eager", "vllm_graph", "vllm_exact", "vitwire"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("towers") / "tiny"
    subprocess.run([PYTHON, "-m", checkpoint.__name__, str(folder), "--tiny"], check=True)
    return folder


@pytest.fixture
def towers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: Path) -> Any:
    monkeypatch.setattr(measuring, "THEIRS", SIMULATED)
    monkeypatch.setattr(measuring, "_SECONDS", 0.02)
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")

    def run(*flags: str, code: int = 0) -> dict[str, Any]:
        words = ["engine-bench", "--towers", "--tiny", "--model", str(model), *flags]
        monkeypatch.setattr("sys.argv", words)
        with pytest.raises(SystemExit) as ended:
            command.main()
        document: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert ended.value.code == code, document.get("error")
        return document

    return run


def test_towers_are_compared_with_float32_and_each_other(towers: Any) -> None:
    """On the CPU, vLLM's attention takes no padding: its default budgets fit two of the sizes."""
    document = towers("--sizes", ",".join(SIZES))
    (skipped,) = document["skipped"][:1]
    assert skipped.startswith("towers 128x1 vllm_graph: vllm: RuntimeError: split_with_sizes")
    rows = {(row["size"], row["tower"]): row for row in document["towers"]}
    missing = ("128x1", "vllm_graph")
    assert list(rows) == [(size, tower) for size in SIZES for tower in TOWERS if (size, tower) != missing]
    for (size, _), row in rows.items():
        assert row["device_ms"] > 0 < row["call_ms"]
        assert row["rows"] == (16 if size == "128x1" else 64)
        assert 0 < row["error_to_float32"] < 0.03
        assert row["error_to_vllm_eager"] < 0.03
        assert (row["calls"], row["calls_not_finite"], row["rows_not_finite"]) == (12, 0, 0)
    assert {place: row["budgets"] for place, row in rows.items()} == {
        (size, tower): [] if tower == "vllm_eager" else [rows[size, tower]["rows"]] for size, tower in rows
    }


def test_gpu_bench_shows_it_beside_graphs_of_exact_sizes() -> None:
    """The same weights, pictures and clips. Only one of these sizes fits a default budget without padding."""
    simulated = f"measuring.THEIRS = {SIMULATED}"
    code = f"from bench.engine.towers import measuring; {simulated}; from bench import gpu; gpu.main()"
    flags = ["--device", "cpu", "--tiny", "--towers", "Qwen3-VL-8B", "--sizes", "112,224,256", "--repeats", "3"]
    folders = ("client", "gateway", "server", "tests/support", ".")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(folders), "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    command = [PYTHON, "-c", code, *flags, "--vllm", sys.executable]
    document = json.loads(subprocess.check_output(command, env=environment).splitlines()[-1])
    assert document["vllm_engine"]["engine"].startswith("vLLM 0.")
    rows = {row.pop("load"): row for row in document["vllm"]}
    assert list(rows) == ["224^2", "256^2", "8x224^2 clip", "16 x 224^2"]
    for load, row in rows.items():
        assert min(row["ours"], row["vllm_eager"], row["vllm_exact"], row["call_ours"]) > 0
        assert row["exact_over_ours"] == pytest.approx(row["vllm_exact"] / row["ours"], abs=0.01)
        assert 0 < row["error"] < 0.03
        assert (row["vllm_graph"] is None) == (load != "256^2") == (row["aim"] is None)
    assert rows["256^2"]["error_vllm"] == pytest.approx(rows["256^2"]["error"], rel=0.1)
    left_out = "\n".join(document["left_out"])
    assert "112^2 vllm: its processor would resize them" in left_out
    assert "8x224 clip vllm_graph: vllm: RuntimeError: split_with_sizes" in left_out
    assert "vllm_exact" not in left_out


def test_rows_that_are_not_finite_are_counted(towers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each third replay of a graph has a NaN in one row; with two graphs in turns, each third picture of both."""
    monkeypatch.setenv("SIMULATED_NAN_EVERY", "3")
    rows = {row["tower"]: row for row in towers("--sizes", "256x1")["towers"]}
    for name in ("vllm_eager", "vitwire"):
        assert rows[name]["calls_not_finite"] == 0
    for name in ("vllm_graph", "vllm_exact"):
        assert (rows[name]["calls"], rows[name]["calls_not_finite"], rows[name]["rows_not_finite"]) == (12, 4, 1)
        assert rows[name]["error_to_float32"] < 0.03


def test_a_side_that_cannot_start_ends_the_run(towers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "THEIRS", ["-c", "raise SystemExit('no vLLM here')"])
    document = towers("--sizes", "128x1", code=1)
    assert "no vLLM here" in document["error"]
