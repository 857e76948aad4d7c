"""`make demo` and `make serve` from a fresh clone: what they install, and what they print."""

import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import psutil
import pytest

from checkpoints import Checkpoints
from vitwire_server.towers.family import TESTED

ROOT = Path(__file__).parents[2]
INPUTS = ("Makefile", "pyproject.toml", "constraints.txt", "requirements-tools.txt")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Files that make looks at, without an environment."""
    for name in INPUTS:
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("target", "extras"),
    [("demo", ["demo"]), ("serve", ["demo"]), ("test", ["demo", "dev"]), ("setup", ["demo", "dev"])],
)
def test_a_target_installs_what_it_needs(target: str, extras: list[str], clone: Path) -> None:
    done = subprocess.run(["make", "-n", target], cwd=clone, capture_output=True, text=True, check=True)
    assert [line.split()[-1] for line in done.stdout.splitlines() if "tools/install.sh" in line] == extras


def test_the_demo_needs_a_part_of_what_the_tests_need() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["demo"] == ["vitwire[cli,router,server,videos]", "scikit-image"]
    assert "demo" in extras["dev"][0]


def test_every_release_of_transformers_that_is_not_pinned_is_tested_by_a_tier() -> None:
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines()[1:])
    others = [release for release in TESTED if release != pins["transformers"]]
    assert len(others) == len(TESTED) - 1, "the pinned release is one of those that are said to be tested"
    done = subprocess.run(["make", "-n", "test", "TIER=versions"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert f"for version in {' '.join(others)};" in done.stdout
    files = {file.stem: file.read_text() for file in (ROOT / "tests" / "versions").iterdir()}
    assert files.keys() == set(others)
    assert all(f"\ntransformers=={release} --hash" in f"\n{text}" for release, text in files.items())


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.matrix)])
def test_make_serve_says_what_to_try_after_the_server_is_ready(
    number: signal.Signals, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    """Ctrl-C, which reaches every process, ends all of them, and so does a signal to make alone."""
    variables = ("DEMO_READY=", f"DEMO={checkpoints('qwen3_vl')}", f"BIN={Path(sys.executable).parent}")
    output = tmp_path / "log"
    with output.open("wb") as log:
        command = ["make", "serve", *variables, "FLAGS=--port 0 --metrics-port 0 --lame-duck-seconds 0"]
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
    try:
        deadline = time.monotonic() + 200
        while "metrics: http" not in output.read_text() and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.05)
        started = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, number) if number is signal.SIGINT else process.terminate()
        process.wait(60)
        assert not psutil.wait_procs(started, 60)[1]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    lines = output.read_text().splitlines()
    (listening,) = [line for line in lines if line.startswith("listening on ")]
    target = listening.split()[2].rstrip(",")
    (ready,) = [number for number, line in enumerate(lines) if line.startswith("ready: ")]
    hints = [number for number, line in enumerate(lines) if f"--target {target}" in line]
    assert len(hints) == 3
    assert min(hints) > ready
