"""The benchmarks run, and say what they say in the form that is promised. They judge no time."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benches import ROOT, last_line


def test_bench(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"items": [{"grid": [1, 20, 30]}, {"grid": [1, 2, 4]}]}\n' * 40)
    document = last_line("bench/cpu.py", "--quick", "--trace", str(trace))
    assert {"date", "torch", "transformers", "threads"} <= document.keys()
    assert [(row["sizes"], row["depth"]) for row in document["planner"]] == [
        (sizes, depth) for sizes in ("shipped sizes", "trace.jsonl") for depth in (1, 4, 16, 64)
    ]
    for row in document["planner"]:
        assert row["padding_ours"] < row["padding_theirs"]
        assert row["launches_ours"] <= row["launches_theirs"]
        assert row["seconds_ours"] < row["seconds_theirs"]
    assert {(row["tower"], row["dtype"]) for row in document["towers"]} == {
        (tower, dtype) for tower in ("qwen3_vl", "qwen2_5_vl") for dtype in ("float32", "bfloat16")
    }
    assert {row["verb"] for row in document["codec"]} == {"write", "read"}


@pytest.mark.matrix
def test_gpu_bench_on_simulated_graphs(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot, out = tmp_path / "plot.png", tmp_path / "bench.json"
    flags = ("--device", "cpu", "--tiny", "--towers", "Qwen2.5-VL-7B", "--sizes", "112,224", "--repeats", "3")
    document = last_line("bench/gpu.py", *flags, "--fp8", "--plot", str(plot), "--out", str(out))
    assert document == json.loads(out.read_text())
    assert (document["device"], document["graphs"], document["left_out"]) == ("cpu", "simulated", [])
    assert len(document["rows"]) == 4
    for row in document["rows"]:
        assert min(row["plain_sdpa"], row["eager"], row["graph"], row["graph_fp8"]) > 0
        assert row["plain_flash"] is row["graph_compiled"] is None
        assert row["graph_stock"] > 0
    assert {row["tower"] for row in document["captures"]} == {"Qwen2.5-VL-7B"}
    assert 0.99 < document["fp8_similarity"]["Qwen2.5-VL-7B"]["least"] < 1
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.matrix
def test_gpu_bench_leaves_out_what_there_is_no_time_for() -> None:
    flags = ("--device", "cpu", "--tiny", "--sizes", "112", "--towers", "Qwen3-VL-8B", "--seconds", "0")
    document = last_line("bench/gpu.py", *flags)
    assert [row["graph"] for row in document["rows"]] == [None]
    assert "Qwen3-VL-8B 112^2 plain_sdpa: no time" in document["left_out"]


@pytest.mark.matrix
def test_the_gpu_tests_fail_at_once_without_cuda() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "VITWIRE_GPU_TEST_DEVICE"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-c", "tests/gpu/pytest.ini", "tests/gpu", "-q"],
        cwd=ROOT,
        env=environment | ({"VITWIRE_GPU_TEST_DEVICE": "tpu"} if cuda() else {}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "VITWIRE_GPU_TEST_DEVICE" in done.stdout + done.stderr


def cuda() -> bool:
    import torch  # noqa: PLC0415 - seconds, for one line

    return torch.cuda.is_available()
