"""`make engine-bench FLAGS=--towers` but for the GPU: vLLM's tower and its budgets, the server's, and float32."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from bench.engine import checkpoint, command
from bench.engine.towers import measuring

from servers import PYTHON

SIZES = ["256x1", "128x4", "128x1"]
TOWERS = ["vllm_eager", "vllm_graph", "vllm_exact", "vitwire"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("towers") / "tiny"
    subprocess.run([PYTHON, "-m", checkpoint.__name__, str(folder), "--tiny"], check=True)
    return folder


@pytest.fixture
def towers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: Path) -> Any:
    monkeypatch.setattr(measuring, "THEIRS", ["-m", "tests.engines.vllm.simulated_graphs"])
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
