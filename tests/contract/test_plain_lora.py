"""Adapters and published layouts of vision transformers that are served alone."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from adapted import trained
from broken import load
from checkpoints import Checkpoints
from plain_reference import PlainReference
from reference import TOLERANCE, error
from rigs import Rig
from vitwire_server.core.grids import Grid
from vitwire_server.core.pooling import Pooling
from vitwire_server.towers.checkpoints.lora import Adapter

CPU = torch.device("cpu")
GRID = Grid(2, 1, 1)
INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("model_type", "pooling", "adapted"),
    [
        ("clip", Pooling.CLS, r".*(vision_model\..*(q_proj|fc1|position_embedding)|visual_projection|text_model.*fc1)"),
        pytest.param(
            "dinov2_with_registers", Pooling.CLS, r".*(query|q_proj|o_proj|fc1|projection)", marks=pytest.mark.matrix
        ),
        pytest.param("dinov3_vit", Pooling.MEAN, r".*(q_proj|up_proj)", marks=pytest.mark.matrix),
        pytest.param("vit", Pooling.NONE, r".*layers.*(q_proj|fc2)", marks=pytest.mark.matrix),
        pytest.param("siglip", Pooling.ATTENTION, r".*vision_model\..*(q_proj|fc1)", marks=pytest.mark.matrix),
    ],
)
def test_merged_rows_are_those_of_peft(
    model_type: str, pooling: Pooling, adapted: str, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    """The projection and the pooling head are adapted too."""
    folder = checkpoints(model_type)
    reference = PlainReference(folder)
    trained(reference.model, tmp_path, target_modules=adapted)
    plain = Rig.of(folder, torch.float32, CPU, sizes=(), pooling=pooling)
    merged = Rig.of(folder, torch.float32, CPU, sizes=(), pooling=pooling, adapter=Adapter.read("tuned", tmp_path))
    reference = PlainReference(folder)
    PeftModel.from_pretrained(reference.model, tmp_path).merge_and_unload()
    ours, before = (rig.run(rig.items([GRID]))[0] for rig in (merged, plain))
    assert error(ours, reference.pooled(pooling, plain.pixels(GRID, 0))) <= TOLERANCE
    assert error(ours, before) > 1e-2, "the adapter changes the rows"


@pytest.mark.parametrize(
    ("model_type", "more"),
    [
        ("clip", {"vision_model.embeddings.position_ids": torch.arange(17)[None]}),
        ("siglip_vision_model", {"embeddings.position_ids": torch.arange(16)[None]}),
        ("dinov2", {"classifier.weight": torch.zeros(5, 128), "classifier.bias": torch.zeros(5)}),
        ("vit", {"classifier.weight": torch.zeros(5, 64), "classifier.bias": torch.zeros(5)}),
    ],
)
def test_weights_that_no_row_passes_through_are_left_out(
    model_type: str, more: dict[str, torch.Tensor], checkpoints: Checkpoints, tmp_path: Path
) -> None:
    """Buffers that older releases of transformers stored, and the layers of classifiers."""
    source = checkpoints(model_type)
    folder = Path(shutil.copytree(source, tmp_path / "copy"))
    weights = {key: tensor for shard in folder.glob("*.safetensors") for key, tensor in load_file(shard).items()}
    save_file({**weights, **more}, folder / "model.safetensors", metadata={"format": "pt"})
    shards = dict.fromkeys([*weights, *more], "model.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": shards}))
    assert load(folder).fingerprint == load(source).fingerprint
