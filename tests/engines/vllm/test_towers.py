"""`make gpu-bench FLAGS=--vllm` but for the GPU: vLLM's tower and its budgets, ours, and float32."""

import json
import os
import subprocess
import sys

import pytest

from servers import PYTHON

SIMULATED = ["-m", "tests.engines.vllm.simulated_graphs"]


def test_vllm_has_graphs_of_exact_sizes_beside_ours() -> None:
    """The same weights, pictures and clips. Only one of these sizes fits a default budget without padding."""
    code = f"from bench import beside_vllm, gpu; beside_vllm.VLLM_TOWER = {SIMULATED}; gpu.main()"
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
        assert (row["vllm_graph"] is None) == (load != "256^2") == (row["vllm_over_ours"] is None)
    assert rows["256^2"]["error_vllm"] == pytest.approx(rows["256^2"]["error"], rel=0.1)
    left_out = "\n".join(document["left_out"])
    assert "112^2 vllm: its processor would resize them" in left_out
    assert "8x224 clip vllm_graph: vllm: RuntimeError: split_with_sizes" in left_out
    assert "vllm_exact" not in left_out
