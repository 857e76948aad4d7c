"""The benchmarks run, and say what they say in the form that is promised. They judge no time."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from bench.beside_vllm import MISSING, compared
from bench.kernels import group_of

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
    out = tmp_path / "bench.json"
    flags = ("--device", "cpu", "--tiny", "--towers", "Qwen2.5-VL-7B", "--sizes", "112,224", "--repeats", "3")
    document = last_line("bench/gpu.py", *flags, "--profile", "--out", str(out))
    assert document == json.loads(out.read_text())
    assert (document["device"], document["graphs"], document["left_out"]) == ("cpu", "simulated", [])
    assert len(document["rows"]) == 4
    for row in document["rows"]:
        assert min(row[name] for name in ("plain_sdpa", "eager", "graph")) > 0
        assert row["graph_stock"] > 0 < row["norm_error"] < 0.05
    assert {row["tower"] for row in document["captures"]} == {"Qwen2.5-VL-7B"}
    assert len(document["profiles"]) == 4
    for kernels in document["profiles"].values():
        assert {"attention", "products", "norms and rest"} == {row["group"] for row in kernels}
        assert sum(row["share"] for row in kernels) == pytest.approx(1, abs=0.05)


@pytest.mark.matrix
@pytest.mark.parametrize("where", ["/nowhere/bin/python", "docs"])
def test_gpu_bench_says_how_to_get_vllm(where: str) -> None:
    flags = ("--device", "cpu", "--tiny", "--sizes", "128", "--towers", "Qwen3-VL-8B", "--repeats", "3")
    document = last_line("bench/gpu.py", *flags, "--vllm", where)
    assert document["left_out"] == [f"Qwen3-VL-8B vllm: {MISSING}"]
    assert document["vllm"] == []
    assert document["rows"][0]["graph"] > 0


def test_graphs_of_vllm_are_compared_with_ours() -> None:
    rows = {"vitwire": 2.0, "vllm_eager": 20.0, "vllm_graph": 3.0, "vllm_exact": 2.9}
    found = compared({name: {"device_ms": time} for name, time in rows.items()})
    assert (found["vllm_eager"], found["vllm_over_ours"], found["exact_over_ours"]) == (20, 1.5, 1.45)
    found = compared({name: {"device_ms": time} for name, time in rows.items() if name != "vitwire"})
    assert (found["ours"], found["vllm_graph"], found["vllm_over_ours"]) == (None, 3, None)


@pytest.mark.parametrize(
    ("kernel", "group"),
    [
        ("_attend", "attention"),
        ("kernel_cutlass_kernel_flash_attncuteflash_fwd_sm90FlashAttentionForwardSm90_object_at__tensor", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3_64x64x64_4x1x1", "attention"),
        ("nvjet_sm90_tst_192x192_64x4_2x1_v_bz_coopA_bias_TNN", "products"),
        ("void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<>>", "products"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int>", "products"),
        ("_add_norm", "norms and rest"),
        ("Memcpy DtoD (Device -> Device)", "norms and rest"),
    ],
)
def test_kernels_are_grouped_by_name(kernel: str, group: str) -> None:
    assert group_of(kernel) == group


@pytest.mark.matrix
def test_gpu_bench_leaves_out_what_there_is_no_time_for() -> None:
    flags = ("--device", "cpu", "--tiny", "--sizes", "112", "--towers", "Qwen3-VL-8B", "--seconds", "0")
    document = last_line("bench/gpu.py", *flags, "--vllm")
    assert [row["graph"] for row in document["rows"]] == [None]
    for what in ("112^2 plain_sdpa", "vllm"):
        assert f"Qwen3-VL-8B {what}: no time" in document["left_out"]


@pytest.mark.matrix
def test_the_gpu_tests_fail_at_once_without_cuda() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "VITWIRE_GPU_TEST_DEVICE"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-c", "tests/gpu/pytest.ini", "tests/gpu", "-q"],
        cwd=ROOT,
        env=environment | ({"VITWIRE_GPU_TEST_DEVICE": "tpu"} if torch.cuda.is_available() else {}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "VITWIRE_GPU_TEST_DEVICE" in done.stdout + done.stderr
