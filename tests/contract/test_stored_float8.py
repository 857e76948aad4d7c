"""Checkpoints that store their tower in float8, in ModelOpt's layout, against plain transformers on the same values."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from checkpoints import Checkpoints
from published_float8 import INDEX, write_dequantised, write_float8
from reference import Reference
from rigs import Rig, draw_grids
from vitwire_server.towers.checkpoints.lora import Adapter
from vitwire_server.towers.files import CheckpointError

CPU = torch.device("cpu")
FLOAT32 = 1e-4
"""Norm error of sums of a few hundred numbers in another order, through four blocks."""
BFLOAT16 = 0.03
"""Each of some twenty roundings to bfloat16 costs 2^-9 at most, one of weights included; most of them less."""


@dataclass(frozen=True)
class Published:
    """A checkpoint in float8, and stock transformers on the values that its weights stand for."""

    folder: Path
    reference: Reference

    def norm_errors(self, rig: Rig) -> Tensor:
        """Norm errors `(rows, parts)` of our rows' main part and deepstack levels, compared with transformers' rows."""
        grids = draw_grids(rig, 1, 4)
        ours = rig.run(rig.items(grids))
        expected = [self.reference.item(grid, rig.pixels(grid, i), rig.crops(grid, i)) for i, grid in enumerate(grids)]
        parts = 1 + rig.tower.geometry.levels
        theirs, own = (torch.cat([*map(torch.as_tensor, each)]).unflatten(1, (parts, -1)) for each in (expected, ours))
        return (own - theirs).norm(dim=2) / theirs.norm(dim=2)


@pytest.fixture(scope="module", params=[("qwen3_vl", False), ("qwen3_vl", True), ("qwen2_5_vl", False)], ids=str)
def published(
    request: pytest.FixtureRequest, checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory
) -> Published:
    model_type, per_channel = request.param
    folder, plain = (tmp_path_factory.mktemp("published") / name for name in ("float8", "float32"))
    exact = write_float8(checkpoints(model_type), folder, per_channel=per_channel)
    write_dequantised(checkpoints(model_type), plain, exact)
    return Published(folder, Reference(plain, torch.float32))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, FLOAT32), (torch.bfloat16, BFLOAT16)], ids=str)
def test_the_stored_values_are_computed_with(published: Published, dtype: torch.dtype, tolerance: float) -> None:
    assert float(published.norm_errors(Rig.of(published.folder, dtype, CPU, sizes=())).max()) <= tolerance


def change(name: str, made: Callable[[Tensor], Tensor | None]) -> Callable[[Path], None]:
    """Change the first tensor whose name ends so, or remove it."""

    def apply(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        key = next(key for key in sorted(index["weight_map"]) if "visual." in key and key.endswith(name))
        shard = folder / index["weight_map"][key]
        tensors = load_file(shard)
        changed = made(tensors.pop(key))
        if changed is None:
            del index["weight_map"][key]
            (folder / INDEX).write_text(json.dumps(index))
        else:
            tensors[key] = changed
        save_file(tensors, shard)

    return apply


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (change("qkv.weight_scale", lambda _: None), r"qkv.weight is quantised \(torch.float8_e4m3fn\), but has no"),
        (change("qkv.weight_scale", lambda scale: scale * torch.nan), "qkv.weight_scale must be positive and finite"),
        (change("qkv.weight_scale", lambda scale: scale * 0), "qkv.weight_scale must be positive and finite"),
        (change("qkv.weight_scale", lambda scale: -scale), "qkv.weight_scale must be positive and finite"),
        (change("qkv.weight_scale", lambda _: torch.ones(2, 3)), r"qkv.weight_scale is .* of shape \(2, 3\), but must"),
        (change("qkv.weight_scale", lambda _: torch.ones(0)), r"of shape \(0,\), but must be one number"),
        (change("qkv.weight_scale", lambda _: torch.tensor(3)), "torch.int64 of shape .*, but must be one number"),
        (change("qkv.weight", lambda each: each.float()), "qkv.weight_scale scales a weight of type torch.float32"),
        (change("qkv.weight", lambda each: each.to(torch.float8_e5m2)), r"is quantised \(torch.float8_e5m2\)"),
        (change("qkv.weight", lambda each: each.view(torch.int8)), r"is quantised \(torch.int8\)"),
        (change("qkv.weight", lambda each: each[:, :-1].contiguous()), "is of shape .*, but config.json asks for"),
    ],
)
def test_what_is_broken_is_named(
    harm: Callable[[Path], None], message: str, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    folder = tmp_path / "copy"
    write_float8(checkpoints("qwen3_vl"), folder)
    harm(folder)
    with pytest.raises(CheckpointError, match=message) as error:
        Rig.of(folder, torch.bfloat16, CPU, sizes=())
    assert "copy" in str(error.value)


@pytest.mark.parametrize("shape", [(1,), (192, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scales_in_the_forms_of_compressed_tensors(
    shape: tuple[int, ...], dtype: torch.dtype, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    """2^-9 is the same number in both types."""
    folder, other = tmp_path / "one", tmp_path / "other"
    write_float8(checkpoints("qwen3_vl"), folder)
    change("qkv.weight_scale", lambda _: torch.tensor(2.0**-9))(folder)
    shutil.copytree(folder, other)
    change("qkv.weight_scale", lambda _: torch.full(shape, 2.0**-9, dtype=dtype))(other)
    one, two = (Rig.of(each, torch.bfloat16, CPU, sizes=()).tower.blocks[0] for each in (folder, other))
    assert torch.equal(one.get_parameter("attn.qkv.weight"), two.get_parameter("attn.qkv.weight"))


def test_a_weight_that_is_stored_twice_must_be_the_same(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """By both of the names that checkpoints of this family have."""
    folder = tmp_path / "copy"
    write_float8(checkpoints("qwen3_vl"), folder)
    index = json.loads((folder / INDEX).read_text())
    key = next(key for key in index["weight_map"] if key.endswith("visual.blocks.0.attn.qkv.weight"))
    shard, again = folder / index["weight_map"][key], key.removeprefix("model.")
    tensors = load_file(shard)
    index["weight_map"] |= {again: shard.name}
    (folder / INDEX).write_text(json.dumps(index))
    save_file({**tensors, again: tensors[key].clone()}, shard)
    Rig.of(folder, torch.bfloat16, CPU, sizes=())
    save_file({**tensors, again: (-tensors[key].float()).to(torch.float8_e4m3fn)}, shard)
    with pytest.raises(CheckpointError, match="differs from another weight"):
        Rig.of(folder, torch.bfloat16, CPU, sizes=())


def test_scales_of_inputs_need_not_be_there(checkpoints: Checkpoints, tmp_path: Path) -> None:
    folder, other = tmp_path / "one", tmp_path / "other"
    write_float8(checkpoints("qwen3_vl"), folder)
    shutil.copytree(folder, other)
    change("qkv.input_scale", lambda _: None)(other)
    rigs = [Rig.of(each, torch.bfloat16, CPU, sizes=()) for each in (folder, other)]
    one, two = (torch.as_tensor(rig.run(rig.items(draw_grids(rig, 1, 2)))[0]) for rig in rigs)
    assert torch.equal(one, two)


def test_an_adapter_changes_stored_weights(checkpoints: Checkpoints, tmp_path: Path) -> None:
    folder = tmp_path / "float8"
    write_float8(checkpoints("qwen3_vl"), folder)
    grow, name = torch.randn(8, 64), "base_model.model.model.visual.blocks.1.attn.qkv"
    columns, channels = 64, 192
    factors = {f"{name}.lora_A.weight": grow[:, :columns], f"{name}.lora_B.weight": torch.randn(channels, 8)}
    (tmp_path / "adapter").mkdir()
    save_file(factors, tmp_path / "adapter" / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "lora_alpha": 8, "r": 8}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(settings))
    plain, merged = (
        Rig.of(folder, torch.bfloat16, CPU, sizes=(), adapter=adapter)
        for adapter in (None, Adapter.read("tuned", tmp_path / "adapter"))
    )
    change = (factors[f"{name}.lora_B.weight"] @ factors[f"{name}.lora_A.weight"]).float()
    before, after = (rig.tower.blocks[1].get_parameter("attn.qkv.weight").float() for rig in (plain, merged))
    torch.testing.assert_close(after, before + change, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("model_type", ["qwen3_vl", "siglip_vision_model", "internvl"])
def test_a_tower_that_is_not_quantised_loads_from_a_checkpoint_that_is(
    model_type: str, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    """As most published ones, whose language model alone is in float8."""
    folder = Path(shutil.copytree(checkpoints(model_type), tmp_path / "copy"))
    config = json.loads((folder / "config.json").read_text())
    quantization = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["*vision*"]}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    rigs = [Rig.of(each, torch.float32, CPU, sizes=()) for each in (folder, checkpoints(model_type))]
    one, two = (torch.as_tensor(rig.run(rig.items(draw_grids(rig, 1, 1)))[0]) for rig in rigs)
    assert torch.equal(one, two)
