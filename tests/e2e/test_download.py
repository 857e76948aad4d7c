"""`vitwire-server download`: the real command, against a hub on loopback."""

import errno
import json
import os
import re
import shutil
import stat
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import constants

from checkpoints import Checkpoints
from hub import Hub, hub
from servers import PYTHON, serving
from vitwire import Client, Item
from vitwire_server.towers.checkpoints.downloading import RECORD, download_model
from vitwire_server.towers.files import CheckpointError, local_folder

MODEL = "owner/model"
OTHER_COMMIT = "1" * 40
NOWHERE = "http://127.0.0.1:9"
Fetch = Callable[[Hub, Path], list[str]]


def recorded(files: object) -> bytes:
    return json.dumps({"model": MODEL, "revision": "main", "files": files}).encode()


def download(running: Hub, folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [PYTHON, "-m", "vitwire_server", "download", MODEL, "--to", str(folder), *flags]
    environment = os.environ | {"HF_ENDPOINT": running.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)


@pytest.fixture(scope="module")
def repository(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in shards, of which some hold the language model alone."""
    return Path(shutil.copytree(checkpoints("qwen3_vl"), tmp_path_factory.mktemp("hub") / "model"))


@pytest.fixture
def fetch(monkeypatch: pytest.MonkeyPatch) -> Fetch:
    """What the command runs, in this process, which has imported torch. Returns its lines."""

    def fetch(running: Hub, folder: Path) -> list[str]:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", running.url)
        template = f"{running.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        lines: list[str] = []
        download_model(MODEL, "main", folder, lines.append)
        return lines

    return fetch


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


def test_a_second_run_fetches_nothing_and_needs_no_hub(repository: Path, tmp_path: Path, fetch: Fetch) -> None:
    with hub(MODEL, repository) as running:
        fetch(running, tmp_path)
        running.fetched.clear()
        fetch(running, tmp_path)
        assert running.fetched == []
    running.url = NOWHERE  # not by the connection that the Hub's client keeps
    (line,) = fetch(running, tmp_path)
    assert "the Hub cannot be reached" in line
    next(tmp_path.glob("*.safetensors")).unlink()
    with pytest.raises(CheckpointError, match="could not be found on the Hub"):
        fetch(running, tmp_path)


def test_a_file_continues_where_the_connection_broke(repository: Path, tmp_path: Path, fetch: Fetch) -> None:
    """The Hub's client writes pieces of 10 MB."""
    large = repository / "tokenizer.json"
    large.write_bytes(json.dumps("x" * 25_000_000).encode())
    try:
        with hub(MODEL, repository) as running:
            running.most = 11 << 20
            fetch(running, tmp_path)
        assert running.resumed == ["tokenizer.json"] * 2
        assert (tmp_path / "tokenizer.json").read_bytes() == large.read_bytes()
    finally:
        large.unlink()


def test_an_interrupted_run_continues_with_the_files_that_are_missing(
    repository: Path, tmp_path: Path, fetch: Fetch
) -> None:
    lost = max(name for name in vision_files(repository) if name.endswith(".safetensors"))
    with hub(MODEL, repository) as running:
        running.lost = {lost}
        with pytest.raises(CheckpointError, match="could not be fetched"):
            fetch(running, tmp_path)
        running.lost.clear()
        fetch(running, tmp_path)
    fetched = Counter(running.fetched)
    assert fetched.keys() == vision_files(repository)
    assert {name for name, count in fetched.items() if count > 1} <= {lost}


def test_a_new_commit_replaces_the_files(
    repository: Path, checkpoints: Checkpoints, tmp_path: Path, fetch: Fetch
) -> None:
    """Of another model, which has fewer shards."""
    with hub(MODEL, repository) as running:
        fetch(running, tmp_path)
    source = checkpoints("clip")
    with hub(MODEL, source, OTHER_COMMIT) as running:
        fetch(running, tmp_path)
    files = [path.name for path in tmp_path.iterdir() if path.name[0] != "."]
    assert set(files) == set(running.fetched)
    for name in files:
        assert (tmp_path / name).read_bytes() == (source / name).read_bytes()


def test_a_mirror_writes_and_deletes_nothing_outside_of_the_directory(
    repository: Path, tmp_path: Path, fetch: Fetch
) -> None:
    outside, folder = tmp_path / "outside.json", tmp_path / "model"
    outside.write_text("{}")
    with hub(MODEL, repository) as running:
        running.listed = {"../outside.json": 9, str(tmp_path / "absolute.json"): 9}
        fetch(running, folder)
        record = folder / RECORD
        record.write_text(json.dumps({**json.loads(record.read_text()), "files": {"../outside.json": 2}}))
        fetch(running, folder)
    assert outside.read_text() == "{}"
    assert not (tmp_path / "absolute.json").exists()


@pytest.mark.parametrize(
    "damaged",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b"[" * 100_000,
        recorded(["config.json"]),
        recorded({"a\0b": 1, "config.json": 1}),
        recorded({"config.json": "1"}),
        recorded({"folder": 1, "x" * 300: 1}),
        recorded({"folder": 1, "": 1, ".": 1, "/": 1, "\ud800": 1}),
    ],
)
def test_a_damaged_record_is_no_obstacle(damaged: bytes, repository: Path, tmp_path: Path, fetch: Fetch) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / RECORD).write_bytes(damaged)
    running = Hub(MODEL, repository, url=NOWHERE)
    with pytest.raises(CheckpointError, match="could not be found on the Hub"):
        fetch(running, tmp_path)
    with hub(MODEL, repository) as running:
        fetch(running, tmp_path)
    assert json.loads((tmp_path / RECORD).read_text())["files"].keys() == vision_files(repository)
    assert (tmp_path / "folder").is_dir()


def test_a_record_is_whole_or_not_there(
    repository: Path, tmp_path: Path, fetch: Fetch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is full when the record is written."""

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), descriptor)

    with hub(MODEL, repository) as running:
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", full)
            with pytest.raises(CheckpointError, match=r"cannot be written: .*No space left"):
                fetch(running, tmp_path)
        assert not [path for path in tmp_path.iterdir() if RECORD in path.name]
        running.fetched.clear()
        fetch(running, tmp_path)
    assert running.fetched == []
    assert stat.S_IMODE((tmp_path / RECORD).stat().st_mode) == stat.S_IMODE((tmp_path / "config.json").stat().st_mode)


@pytest.mark.parametrize("size", ["123", None, -1, 1.5, True, [1]])
def test_a_size_that_is_none_is_named(size: object, repository: Path, tmp_path: Path, fetch: Fetch) -> None:
    with hub(MODEL, repository) as running:
        running.listed = {"config.json": size}
        with pytest.raises(CheckpointError, match=re.escape(f"the Hub announces {size!r} bytes for config.json")):
            fetch(running, tmp_path)
        running.listed = {"README.md": size}
        fetch(running, tmp_path)


@pytest.mark.parametrize(
    "answer", [[], "text", {"siblings": 5}, {"siblings": [{"size": 1}]}, {"siblings": ["x"]}, {"siblings": [None]}]
)
def test_an_answer_of_another_form_is_one_line(answer: object, repository: Path, tmp_path: Path, fetch: Fetch) -> None:
    with hub(MODEL, repository) as running:
        running.answer = answer
        with pytest.raises(CheckpointError, match="could not be found on the Hub"):
            fetch(running, tmp_path)


@pytest.mark.parametrize(
    "name", [RECORD, f"./{RECORD}", ".cache/x.json", "a\\b.json", "\0.json", "x" * 300 + ".json", 5]
)
def test_an_odd_name_in_a_listing_is_not_fetched(name: object, repository: Path, tmp_path: Path, fetch: Fetch) -> None:
    with hub(MODEL, repository) as running:
        running.answer = json.loads(running.described(f"/api/models/{MODEL}") or b"")
        assert isinstance(running.answer, dict)
        running.answer["siblings"].append({"rfilename": name, "size": 2})
        fetch(running, tmp_path)
        assert set(running.fetched) == vision_files(repository)


def test_a_directory_without_room_is_refused_before_anything_is_fetched(
    repository: Path, tmp_path: Path, fetch: Fetch
) -> None:
    with hub(MODEL, repository) as running:
        running.listed = {"huge.json": 1 << 50}
        with pytest.raises(CheckpointError, match="GB are needed"):
            fetch(running, tmp_path)
    assert running.fetched == []


def test_errors_are_one_line(tmp_path: Path) -> None:
    run = download(Hub(MODEL, tmp_path, url=NOWHERE), tmp_path / "model", "--revision", "v1")
    assert run.returncode == 1
    assert "owner/model at v1 could not be found on the Hub" in run.stderr
    assert len(run.stderr.strip().splitlines()) == 1


def test_a_path_is_no_model(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match="is a local directory"):
        download_model(str(repository), "main", tmp_path, print)
    with pytest.raises(CheckpointError, match="missing does not exist"):
        download_model("./missing", "main", tmp_path, print)
    monkeypatch.chdir(repository.parent)
    name = f"{repository.name}/other"
    assert local_folder(name) is None, "models may be kept in folders of their ids"
