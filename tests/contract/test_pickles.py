"""Weights that torch.save wrote, in the layout of the hub: the same rows, and no code of the file is run."""

import json
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from broken import load
from checkpoints import Checkpoints
from hub import hub
from plain_reference import PlainReference
from reference import TOLERANCE, error
from rigs import Rig
from vitwire_server.core.grids import Grid
from vitwire_server.core.pooling import Pooling
from vitwire_server.towers.checkpoints import weights
from vitwire_server.towers.checkpoints.checkpoint import load_tower, open_checkpoint
from vitwire_server.towers.files import CheckpointError

SINGLE, INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
CPU = torch.device("cpu")


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for shard in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(shard).items()}


def pickled(source: Path, folder: Path, *, zipped: bool = True, more: dict[str, Any] | None = None) -> Path:
    """A copy of a checkpoint whose weights are in one file of torch.save."""
    copied = Path(shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*safetensors*")))
    content = {**weights_of(source), **(more or {})}
    torch.save(content, copied / SINGLE, _use_new_zipfile_serialization=zipped)
    return copied


def in_shards(source: Path, folder: Path) -> Path:
    """A copy of a checkpoint with a shard of torch.save for the weights of its tower, and another for the others."""
    copied = Path(shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*safetensors*")))
    shard_of = {name: f"pytorch_model-{1 + ('vision' in name or 'visual' in name)}.bin" for name in weights_of(source)}
    for shard in set(shard_of.values()):
        torch.save({name: own for name, own in weights_of(source).items() if shard_of[name] == shard}, copied / shard)
    (copied / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": shard_of}))
    return copied


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before-1.6"])
def test_rows_are_those_of_transformers(zipped: bool, checkpoints: Checkpoints, tmp_path: Path) -> None:
    folder, grid = pickled(checkpoints("clip"), tmp_path / "copy", zipped=zipped), Grid(2, 1, 1)
    rig = Rig.of(folder, torch.float32, CPU, sizes=(), pooling=Pooling.CLS)
    theirs = PlainReference(folder).pooled(Pooling.CLS, rig.pixels(grid, 0))
    assert error(rig.run(rig.items([grid]))[0], theirs) <= TOLERANCE


def test_only_shards_of_the_tower_are_read(checkpoints: Checkpoints, tmp_path: Path) -> None:
    source = checkpoints("clip")
    folder = in_shards(source, tmp_path / "copy")
    projection = json.loads((folder / INDEX).read_text())["weight_map"]["visual_projection.weight"]
    assert projection == "pytorch_model-2.bin"
    (folder / "pytorch_model-1.bin").unlink()
    assert load(folder).fingerprint == load(source).fingerprint
    (folder / "pytorch_model-2.bin").unlink()
    with pytest.raises(CheckpointError, match=r"pytorch_model-2\.bin is missing"):
        load(folder)


def test_safetensors_are_preferred(checkpoints: Checkpoints, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(checkpoints("clip"), tmp_path / "copy"))
    (folder / SINGLE).write_bytes(b"garbage")
    assert load(folder).fingerprint == load(checkpoints("clip")).fingerprint


def test_a_weight_may_be_a_parameter_or_a_view(checkpoints: Checkpoints, tmp_path: Path) -> None:
    source, name = checkpoints("clip"), "vision_model.encoder.layers.0.mlp.fc1.weight"
    weight = weights_of(source)[name]
    for number, own in enumerate((torch.nn.Parameter(weight), weight.t().contiguous().t())):
        folder = pickled(source, tmp_path / str(number), more={name: own})
        assert load(folder).fingerprint == load(source).fingerprint


class Program:
    """Unpickled, it makes a directory."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, (str(self._mark),)


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before-1.6"])
def test_a_program_is_not_run(zipped: bool, checkpoints: Checkpoints, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    folder = pickled(checkpoints("clip"), tmp_path / "copy", zipped=zipped, more={"x": Program(mark)})
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin holds more than tensors.*mkdir") as refused:
        load(folder)
    assert not mark.exists()
    assert "weights_only" not in str(refused.value), "no advice to run it"


def resized(length: Callable[[int], int]) -> Callable[[Path], Any]:
    return lambda path: path.write_bytes(path.read_bytes()[: length(path.stat().st_size)])


def archive(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as written:
        written.writestr("readme.txt", "no weights")


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before-1.6"])
@pytest.mark.parametrize(
    "harm",
    [
        resized(lambda _: 0),
        resized(lambda size: size // 2),
        resized(lambda size: size - 1),
        archive,
        lambda path: path.write_bytes(b"version https://git-lfs.github.com/spec/v1\n"),
        lambda path: torch.save(torch.zeros(2), path),
        lambda path: torch.save({5: torch.zeros(2)}, path),
        lambda path: torch.save(torch.nn.Linear(2, 2), path),
    ],
    ids=["empty", "half", "one-byte", "archive", "pointer", "tensor", "no-names", "module"],
)
def test_a_file_that_is_damaged_or_no_state_dict_is_named(
    harm: Callable[[Path], Any], zipped: bool, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    folder = pickled(checkpoints("clip"), tmp_path / "copy", zipped=zipped)
    harm(folder / SINGLE)
    with pytest.raises(CheckpointError, match="copy") as refused:
        load(folder)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (5, "must be a tensor, but is of type int"),
        (torch.zeros(64, dtype=torch.complex64), "must be a dense tensor of real numbers, but is torch.complex64"),
        (torch.zeros(64, 64).to_sparse(), "must be a dense tensor"),
        (torch.zeros(64, device="meta"), "must be a dense tensor"),
        (torch.zeros(64, dtype=torch.int8), "is quantised"),
        (torch.zeros(1).expand(1 << 40), "has fewer values than its shape needs"),
        (torch.zeros(64, dtype=torch.int64), "is of type torch.int64, but must be floating point"),
    ],
    ids=["number", "complex", "sparse", "meta", "int8", "expanded", "int64"],
)
def test_a_weight_that_no_tower_computes_with_is_named(
    value: object, message: str, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    name = "vision_model.post_layernorm.weight"
    folder = pickled(checkpoints("clip"), tmp_path / "copy", more={name: value})
    with pytest.raises(CheckpointError, match=rf"post_layernorm\.weight.*{message}"):
        load(folder)


def test_a_large_file_that_cannot_be_mapped_is_not_read(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = pickled(checkpoints("clip"), tmp_path / "copy", zipped=False)
    monkeypatch.setattr(weights, "_WHOLE_BYTES", 1000)
    with pytest.raises(CheckpointError, match=r"before 1\.6.*convert it by torch\.save"):
        load(folder)


@pytest.mark.parametrize("outside", ["../clip.bin", "/etc/passwd", "a/../../clip.safetensors"])
def test_an_index_names_files_of_its_directory_only(outside: str, checkpoints: Checkpoints, tmp_path: Path) -> None:
    folder = in_shards(checkpoints("clip"), tmp_path / "copy")
    content = json.loads((folder / INDEX).read_text())
    content["weight_map"]["visual_projection.weight"] = outside
    (folder / INDEX).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=rf"{INDEX}: visual_projection.weight is in .* of this directory"):
        load(folder)


def test_two_weights_for_one_place_are_refused_unless_they_are_equal(checkpoints: Checkpoints, tmp_path: Path) -> None:
    source, name = checkpoints("siglip_vision_model"), "post_layernorm.weight"
    held = weights_of(source)
    own = next(each for each in held if each.endswith(name))
    other = name if own != name else f"vision_model.{name}"
    same = pickled(source, tmp_path / "same", more={other: held[own].clone()})
    assert load(same).fingerprint == load(source).fingerprint
    different = pickled(source, tmp_path / "different", more={other: held[own] + 1})
    with pytest.raises(CheckpointError, match=rf"{name} differs from another weight"):
        load(different)


@pytest.mark.parametrize(
    ("kinds", "fetched"),
    [
        (("bin",), {SINGLE}),
        (("shards",), {INDEX, "pytorch_model-2.bin"}),
        (("bin", "safetensors"), {"model.safetensors"}),
    ],
)
def test_the_hub_is_asked_for_pickles_only_if_there_are_no_safetensors(
    kinds: tuple[str, ...],
    fetched: set[str],
    checkpoints: Checkpoints,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = checkpoints("clip")
    folder = (in_shards if "shards" in kinds else pickled)(source, tmp_path / "repository")
    if "safetensors" in kinds:
        save_file(weights_of(source), folder / "model.safetensors")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    with hub("owner/clip", folder) as running:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", running.url)
        template = f"{running.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        checkpoint = open_checkpoint("owner/clip")
        found = load_tower(checkpoint, dtype=torch.float32, device=CPU).fingerprint
    assert found == load(source).fingerprint
    assert {name for name in running.fetched if "model" in name} == fetched
