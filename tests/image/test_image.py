"""The image that buildah made of the Dockerfile, run by runc as its own user on a read-only root."""

import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
from containers import Container, Image, running

from vitwire import Client, Item
from vitwire_server.demo.checkpoint import write_demo_checkpoint

REPOSITORY = Path(__file__).parents[2]
VARIANT = os.environ.get("VITWIRE_IMAGE_VARIANT", "cpu")
PHOTO = np.arange(96 * 128 * 3, dtype=np.uint32).astype(np.uint8).reshape(96, 128, 3)
TOOLS = {"make", "cmake", "cargo", "rustc", "git", "pip", "pip3", "clang", "nvcc", "gfortran", "go", "curl", "wget"}
COMPILERS = {"cpu": set[str](), "cuda": {"gcc"}}
"""With CUDA, Triton compiles one C file."""


@pytest.fixture(scope="session")
def image() -> Image:
    root = Path(os.environ["VITWIRE_IMAGE_ROOT"]).resolve()
    document = json.loads((REPOSITORY / ".tools/image/image.json").read_text(encoding="utf-8"))
    return Image(root, document["Docker"]["config"])


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "model"
    write_demo_checkpoint("qwen3_vl", folder)
    for path in (folder.parent, *folder.rglob("*"), folder):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return folder


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serving(image: Image, model: Path, folder: Path, **settings: str) -> Iterator[tuple[Container, str]]:
    """A container with the image's own command, and its address."""
    port = free_port()
    environment = {
        "VITWIRE_MODEL": "/models",
        "VITWIRE_HOST": "127.0.0.1",
        "VITWIRE_METRICS_HOST": "127.0.0.1",
        "VITWIRE_PORT": str(port),
        "VITWIRE_METRICS_PORT": str(free_port()),
        "VITWIRE_LAME_DUCK_SECONDS": "0",
        "VITWIRE_DEVICE": "cpu",
    } | settings
    with running(image, (), folder, environment, {"/models": model}) as container:
        yield container, f"127.0.0.1:{port}"


@pytest.fixture(scope="module")
def served(image: Image, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Container, str]]:
    settings = {"VITWIRE_GRAPHS": "simulated", "VITWIRE_MAX_BUDGET_TOKENS": "1024"}
    with serving(image, model, tmp_path_factory.mktemp("served"), **settings) as (container, target):
        container.wait_for("ready: ")
        yield container, target


def test_the_configuration_is_that_of_the_dockerfile(image: Image) -> None:
    assert image.user == (10001, 10001)
    assert image.config["Entrypoint"] == ["tini", "--", "python3", "-m", "vitwire_server"]
    assert image.config["StopSignal"] == "SIGTERM"
    labels = image.config["Labels"]
    assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert re.fullmatch(r"[0-9a-f]{40}|unknown", labels["org.opencontainers.image.revision"])
    assert labels["org.opencontainers.image.base.name"].startswith("python:3.11-slim")


def test_it_is_healthy_by_its_own_check(image: Image, served: tuple[Container, str]) -> None:
    container, target = served
    kind, *command = image.config["Healthcheck"]["Test"]
    done = container.run(*command)
    assert (kind, done.returncode, done.stdout) == ("CMD", 0, "SERVING\n"), done.stderr
    with Client(target) as client:
        (embedding,) = client.encode_images([PHOTO])
    assert np.isfinite(embedding.numpy()).all()


def test_the_check_fails_where_nothing_serves(image: Image, served: tuple[Container, str]) -> None:
    """VITWIRE_TARGET replaces the address that VITWIRE_PORT gives."""
    container, _ = served
    command = image.config["Healthcheck"]["Test"][1:]
    done = container.run("env", f"VITWIRE_TARGET=127.0.0.1:{free_port()}", *command)
    assert (done.returncode, done.stdout) == (1, "")


def test_the_server_reports_its_version_and_its_flags(served: tuple[Container, str]) -> None:
    container, _ = served
    assert container.run("vitwire-server", "--version").stdout.split()[-1] == version("vitwire")
    assert "--max-budget-tokens" in container.run("vitwire-server", "serve", "--help").stdout


def test_it_runs_without_privileges_on_a_read_only_root(served: tuple[Container, str]) -> None:
    container, _ = served
    status = dict(
        line.split(":\t") for line in container.run("cat", "/proc/1/status").stdout.splitlines() if ":\t" in line
    )
    assert status["Uid"].split() == ["10001"] * 4
    assert int(status["CapEff"], 16) == 0
    assert status["NoNewPrivs"] == "1"
    for folder in ("/", "/opt/vitwire", "/opt/vitwire/lib", "/models", "/etc", "/var/tmp"):
        done = container.run("touch", f"{folder}/written")
        assert "Read-only file system" in done.stderr, folder
    assert container.run("touch", "/tmp/written").returncode == 0


def test_no_file_is_writable_or_runs_as_another_user(image: Image) -> None:
    command = ["find", image.root, "-xdev", "(", "-perm", "-o+w", "-type", "f", "-o", "-uid", "10001", ")"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == ""


def test_nothing_compiles_but_what_triton_needs(image: Image) -> None:
    """No build tools, no pip, nothing that downloads, and of compilers only the one of this variant, in any folder."""
    command = ["find", image.root, "-xdev", "-perm", "-u+x", "-not", "-type", "d", "-printf", "%f\n"]
    names = set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines())
    assert not names & TOOLS
    assert names & {"gcc", "g++"} == COMPILERS[VARIANT]
    languages = {name for name in names if re.fullmatch(r"cc1\w*|f951|gnat1|d21|go1|rust1", name)}
    assert languages == (set() if VARIANT == "cpu" else {"cc1"})
    assert not list((image.root / "opt/vitwire/lib").glob("python3*/site-packages/pip"))
    assert not list((image.root / "var/lib/apt/lists").glob("*_Packages*"))
    assert not list(image.root.glob("src/*"))


def test_packages_are_those_of_the_lock(image: Image) -> None:
    folder = next((image.root / "opt/vitwire/lib").glob("python3*/site-packages"))
    installed = {path.name.rpartition(".")[0].partition("-")[0].lower() for path in folder.glob("*.dist-info")}
    extras = f"server,cli,{os.environ.get('VITWIRE_IMAGE_EXTRAS', '')}"
    command = ["python3", "tools/locked.py", "--variant", VARIANT, extras]
    selected = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    locked = {
        name.lower().replace("-", "_").replace(".", "_") for name in re.findall(r"^([\w.-]+)==", selected, re.MULTILINE)
    }
    assert {name.replace(".", "_") for name in installed} - {"vitwire"} == locked


def test_the_toolchain_suffices_at_run_time(served: tuple[Container, str]) -> None:
    """The check of the build, as the image's user on a read-only root: Triton's C file compiles, if Triton is there."""
    container, _ = served
    done = container.run("python3", "-m", "vitwire_server.runtime.toolchain")
    assert (done.returncode, done.stderr) == (0, "")


def test_orphans_are_reaped(served: tuple[Container, str]) -> None:
    """PID 1 reaps what its children left behind, such as the decoders of an RPC process that was killed."""
    container, _ = served
    assert container.run("sh", "-c", "(sh -c 'exit 0' & exec sh -c 'sleep 0.3 & exit 0') & exit 0").returncode == 0
    program = (
        "import glob;print([line for path in glob.glob('/proc/[0-9]*/stat') if ') Z ' in (line := open(path).read())])"
    )
    deadline = time.monotonic() + 30
    while (zombies := container.run("python3", "-c", program).stdout.strip()) != "[]":
        assert time.monotonic() < deadline, zombies
        time.sleep(0.2)


def test_sigterm_drains(image: Image, model: Path, tmp_path: Path) -> None:
    """What was accepted is answered, and PID 1 exits with 0."""
    results: list[int] = []
    with serving(image, model, tmp_path, VITWIRE_DRAIN_SECONDS="30") as (container, target):
        container.wait_for("ready: ")
        with Client(target, timeout=60) as client:
            model_of = client.model()
            width = 3 * model_of.temporal_patch_size * model_of.patch_size**2
            large = Item(np.zeros((64 * 64, width), np.float32), (1, 64, 64))
            client.encode([large])
            worker = threading.Thread(
                target=lambda: results.extend(len(e.numpy()) for e in client.encode([large] * 12))
            )
            worker.start()
            deadline = time.monotonic() + 60
            while "vitwire_inflight_requests 1.0" not in container.run("python3", "-c", _INFLIGHT).stdout:
                assert time.monotonic() < deadline
            container.signal("TERM")
            worker.join(60)
        assert container.process.wait(60) == 0
    assert results == [32 * 32] * 12


_INFLIGHT = """
import os, urllib.request
url = f"http://127.0.0.1:{os.environ['VITWIRE_METRICS_PORT']}/metrics"
print(*(line for line in urllib.request.urlopen(url).read().decode().splitlines() if 'inflight' in line), sep="\\n")
"""


@pytest.mark.parametrize("name", ["TERM", "INT"])
def test_a_signal_during_the_start_ends_it(image: Image, model: Path, tmp_path: Path, name: str) -> None:
    """PID 1 has no default action for signals, and imports take seconds."""
    with serving(image, model, tmp_path) as (container, _):
        deadline = time.monotonic() + 60
        while container.run("true").returncode and time.monotonic() < deadline:
            time.sleep(0.05)
        container.signal(name)
        code = container.process.wait(60)
    # 1: SIGINT while the interpreter imports `site` or `runpy`, before any code of the server.
    assert code in {0, 1, 128 + signal.Signals[f"SIG{name}"]}
