"""`vitwire-server download`: the real command, against a hub on loopback."""

import json
import os
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from checkpoints import Checkpoints
from hub import Hub, hub
from servers import PYTHON, serving
from vitwire import Client, Item

MODEL = "owner/model"
OTHER_COMMIT = "1" * 40


def download(running: Hub, folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [PYTHON, "-m", "vitwire_server", "download", MODEL, "--to", str(folder), *flags]
    environment = os.environ | {"HF_ENDPOINT": running.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)


@pytest.fixture(scope="module")
def repository(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in shards, of which some hold the language model alone."""
    return Path(shutil.copytree(checkpoints("qwen3_vl"), tmp_path_factory.mktemp("hub") / "model"))


def vision_files(repository: Path) -> set[str]:
    index = json.loads((repository / "model.safetensors.index.json").read_text())
    shards = {shard for name, shard in index["weight_map"].items() if "visual" in name}
    assert shards < set(index["weight_map"].values())
    return shards | {path.name for path in repository.glob("*.json")}


def test_only_what_serve_reads_is_fetched_and_it_serves(repository: Path, tmp_path: Path) -> None:
    with hub(MODEL, repository) as running:
        run = download(running, tmp_path / "model")
    assert (run.returncode, run.stderr.count("Traceback")) == (0, 0), run.stderr
    assert set(running.fetched) == vision_files(repository)
    assert {path.name for path in (tmp_path / "model").iterdir() if path.name[0] != "."} == vision_files(repository)
    with serving(tmp_path / "model", "--dtype", "float32") as server, Client(server.target) as client:
        (embedding,) = client.encode([Item(np.ones((16, 1536), np.float32), (1, 4, 4))])
        assert np.isfinite(embedding.numpy()).all()


def test_a_second_run_fetches_nothing_and_needs_no_hub(repository: Path, tmp_path: Path) -> None:
    with hub(MODEL, repository) as running:
        assert download(running, tmp_path).returncode == 0
        running.fetched.clear()
        assert download(running, tmp_path).returncode == 0
        assert running.fetched == []
    offline = download(running, tmp_path)
    assert offline.returncode == 0
    assert "the Hub cannot be reached" in offline.stdout
    next(tmp_path.glob("*.safetensors")).unlink()
    assert download(running, tmp_path).returncode == 1


def test_a_file_continues_where_the_connection_broke(repository: Path, tmp_path: Path) -> None:
    """The Hub's client writes pieces of 10 MB."""
    large = repository / "tokenizer.json"
    large.write_bytes(json.dumps("x" * 25_000_000).encode())
    try:
        with hub(MODEL, repository) as running:
            running.most = 11 << 20
            run = download(running, tmp_path)
        assert run.returncode == 0, run.stderr
        assert running.resumed == ["tokenizer.json"] * 2
        assert (tmp_path / "tokenizer.json").read_bytes() == large.read_bytes()
    finally:
        large.unlink()


def test_an_interrupted_run_continues_with_the_files_that_are_missing(repository: Path, tmp_path: Path) -> None:
    lost = max(name for name in vision_files(repository) if name.endswith(".safetensors"))
    with hub(MODEL, repository) as running:
        running.lost = {lost}
        run = download(running, tmp_path)
        assert run.returncode == 1
        assert "could not be fetched" in run.stderr
        assert "Traceback" not in run.stderr
        running.lost.clear()
        assert download(running, tmp_path).returncode == 0
    fetched = Counter(running.fetched)
    assert fetched.keys() == vision_files(repository)
    assert {name for name, count in fetched.items() if count > 1} <= {lost}


def test_a_new_commit_replaces_the_files(repository: Path, checkpoints: Checkpoints, tmp_path: Path) -> None:
    """Of another model, which has fewer shards."""
    with hub(MODEL, repository) as running:
        assert download(running, tmp_path).returncode == 0
    source = checkpoints("clip")
    with hub(MODEL, source, OTHER_COMMIT) as running:
        assert download(running, tmp_path).returncode == 0
    files = [path.name for path in tmp_path.iterdir() if path.name[0] != "."]
    assert set(files) == set(running.fetched)
    for name in files:
        assert (tmp_path / name).read_bytes() == (source / name).read_bytes()


def test_errors_are_one_line(tmp_path: Path) -> None:
    nowhere = Hub(MODEL, tmp_path, url="http://127.0.0.1:9")
    for run in (download(nowhere, tmp_path / "model"), download(nowhere, tmp_path / "model", "--revision", "v1")):
        assert run.returncode == 1
        assert "could not be found on the Hub" in run.stderr
        assert len(run.stderr.strip().splitlines()) == 1
