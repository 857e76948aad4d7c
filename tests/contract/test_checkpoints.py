"""Checkpoints that are broken in the ways they are: one sentence that names the file, never a traceback."""

import shutil
from pathlib import Path

import pytest
import transformers

from broken import Break, edit, load, write
from conftest import Checkpoints
from vitwire_server.towers.checkpoint import open_checkpoint
from vitwire_server.towers.families import FAMILIES
from vitwire_server.towers.files import CheckpointError

INDEX = "model.safetensors.index.json"
PREPROCESSOR = "preprocessor_config.json"


def truncate_shards(folder: Path) -> None:
    for shard in folder.glob("*.safetensors"):
        shard.write_bytes(shard.read_bytes()[:100])


def single_garbage(folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink()
    (folder / "model.safetensors").write_bytes(b"garbage")


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (lambda folder: (folder / "config.json").unlink(), "holds no config.json"),
        (write("config.json", "{"), "cannot be read as JSON"),
        (write("config.json", "[]"), "holds no JSON object"),
        (edit("config.json", vision_config=None), "Qwen2.5-VL configuration|no vision tower"),
        (edit("config.json", vision_config=[1]), "Qwen2.5-VL configuration"),
        (edit("config.json", dtype="float64", vision_config__dtype="float64"), "float64|configuration"),
        (edit("config.json", vision_config__hidden_size=96), "do not fit|no vision tower"),
        (edit("config.json", vision_config__depth=9), "missing keys"),
        (edit("config.json", vision_config__num_heads=0), "no vision tower"),
        (edit("config.json", vision_config__hidden_act="no_such"), "no vision tower|configuration"),
        (write(INDEX, "{}"), "holds no weight_map"),
        (edit(INDEX, weight_map=[1, 2]), "holds no weight_map"),
        (edit(INDEX, weight_map={"visual.x": 5}), "holds no weight_map"),
        (edit(INDEX, weight_map={"lm_head.weight": "model-00001-of-00005.safetensors"}), "holds no vision tower"),
        (lambda folder: (folder / INDEX).unlink(), "holds neither"),
        (single_garbage, "is no safetensors file"),
        (truncate_shards, "is no safetensors file"),
        (lambda folder: (folder / PREPROCESSOR).unlink(), "holds no preprocessor_config.json"),
        (edit(PREPROCESSOR, image_mean=[0.5]), "3 channels"),
        (edit(PREPROCESSOR, image_std=[0.5, 0.0, 0.5]), "must be finite"),
        (edit(PREPROCESSOR, image_mean=[float("nan")] * 3), "must be finite"),
        (edit(PREPROCESSOR, size={"shortest_edge": 9, "longest_edge": 3}), "are no bounds"),
        (edit(PREPROCESSOR, size={}), "shortest_edge.* is missing"),
        (edit(PREPROCESSOR, resample=99), "no filter"),
        (write("processor_config.json", '{"image_processor": 5}'), "processor_config.json"),
    ],
)
def test_what_is_broken_is_named(harm: Break, told: str, checkpoints: Checkpoints, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(checkpoints("qwen2_5_vl"), tmp_path / "copy"))
    harm(folder)
    with pytest.raises(CheckpointError, match=told) as error:
        load(folder)
    assert "copy" in str(error.value)


def test_a_transformers_that_is_too_old_is_told_of_in_one_sentence(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = FAMILIES["qwen2_vl"]
    monkeypatch.setattr(transformers, "__version__", "5.16.2")
    with pytest.raises(
        CheckpointError, match=f"needs transformers {family.transformers} or newer, 5.16.2 is installed"
    ):
        open_checkpoint(str(checkpoints("qwen2_vl")))
