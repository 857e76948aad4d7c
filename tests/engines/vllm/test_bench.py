"""`make engine-bench` but for the GPU: vLLM's command line, front end, scheduler and connector, router and server."""

import json
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
from bench.engine import checkpoint

from benches import last_line
from servers import PYTHON

ENGINE = f"{sys.executable} -m tests.engines.vllm.serve_in_process"
SERVER_FLAGS = "--cache-bytes 8000000 --dtype bfloat16 --graphs off"
SECONDS = 300


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench") / "tiny"
    subprocess.run([PYTHON, "-m", checkpoint.__name__, str(folder), "--tiny"], check=True)
    return folder


def words(model: Path, *flags: str) -> list[str]:
    common = ["--model", str(model), "--tiny", "--text", "10", "--tokens", "3", "--clients", "1", "--sizes", "mix"]
    common += ["--engine", ENGINE, "--server-flags", SERVER_FLAGS, "--start-seconds", "1"]
    return ["-m", "bench.engine", *common, *flags]


def test_bench(model: Path, tmp_path: Path) -> None:
    """All setups answer all requests, and pairs fetch each image once; a continued run starts none again."""
    out = tmp_path / "engine.json"
    flags = ("--order", "local,beside,plugin", "--loads", "c4", "--requests", "120", "--out", str(out))
    document = last_line(*words(model, *flags))
    assert "error" not in document, document
    answered = [(row["setup"], row["errors"]) for row in document["streams"]]
    assert answered == [("local", 0), ("beside", 0), ("plugin", 0)]
    local, beside, plugin = document["streams"]
    for row in document["streams"]:
        assert row["requests_per_s"] > 0 < row["itl_p99_ms"]
        assert row["ttft_p99_ms"] >= row["ttft_p50_ms"] > 0 < row["prefill_mean_ms"]
    parts = [beside[f"{name}_cpu_ms"] for name in ("engine", "encoder", "router")]
    assert beside["cpu_ms"] == pytest.approx(sum(parts), abs=0.03)
    assert local["cpu_ms"] == local["engine_cpu_ms"] > 0
    assert plugin["cpu_ms"] == pytest.approx(plugin["engine_cpu_ms"] + plugin["encoder_cpu_ms"], abs=0.02)
    stages = ("sent", "accepted", "queued", "fetched", "first_token")
    for row, spans in zip((beside, plugin), document["spans"], strict=True):
        assert row["connector"]["vitwire_ec_fetched_items_total"] >= spans["of"] > 30
        for earlier, later in pairwise(stages):
            assert spans[f"{earlier}_{later}_p50_ms"] > 0, spans
    assert [row["setup"] for row in document["against_local"]] == ["beside", "plugin"]
    assert document["starts"][1]["kv_tokens"] == document["starts"][0]["kv_tokens"] == [256 * 16]
    assert last_line(*words(model, *flags))["streams"] == document["streams"]


def test_two_pairs_share_the_load(model: Path) -> None:
    document = last_line(*words(model, "--setup", "2@2", "--order", "beside", "--loads", "c4", "--requests", "40"))
    assert "error" not in document, document
    (row,) = document["streams"]
    assert (row["requests"], row["errors"]) == (40, 0)
    assert len(document["starts"][0]["kv_tokens"]) == 2
    assert document["spans"][0]["of"] > 10


def test_an_engine_that_dies_ends_the_run_and_its_log_is_shown(model: Path, tmp_path: Path) -> None:
    """Killed under load: what was measured is kept, and no process stays."""
    out = tmp_path / "engine.json"
    command = [
        sys.executable,
        *words(model, "--order", "local", "--loads", "c2,p5", "--requests", "100", "--out", str(out)),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as bench:
        deadline = time.monotonic() + SECONDS
        while '"c2"' not in (out.read_text() if out.exists() else "") and time.monotonic() < deadline:
            time.sleep(0.1)
        children = psutil.Process(bench.pid).children(recursive=True)
        next(each for each in children if "serve_in_process" in " ".join(each.cmdline())).kill()
        stdout, stderr = bench.communicate(timeout=SECONDS)
    document = json.loads(stdout.splitlines()[-1])
    assert bench.returncode == 1, stderr
    assert "local: the engine ended with -9" in document["error"]
    assert document["streams"][0]["load"] == "c2"
    assert not [each for each in children if each.is_running()]


def test_a_refused_request_is_shown(model: Path) -> None:
    """The engine has room for 8192 tokens, the prompts have more."""
    document = last_line(
        *words(model, "--order", "local", "--loads", "c2", "--requests", "10", "--text", "9000"), code=1
    )
    assert "every request" in document["error"]
    assert "HTTP 400" in document["error"]
