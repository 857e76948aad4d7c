"""Adapters merged at load, against the peft library merging the same adapter into the whole model."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

import broken
from adapted import trained
from checkpoints import MODEL_TYPES, Checkpoints
from reference import TOLERANCE, Reference, error
from references import reference_of
from rigs import Rig
from vitwire_server.core.grids import Grid
from vitwire_server.towers.checkpoints.lora import Adapter
from vitwire_server.towers.files import CheckpointError

CPU = torch.device("cpu")
WEIGHTS = "adapter_model.safetensors"
# Linear layers of every kind of tower, a convolution, learned positions, a projector beside the tower, names that
# are converted at load, and layers of the LLM, which are left out.
ADAPTED = {
    "qwen2_5_vl": r".*(visual\.blocks\.\d+\.(attn\.qkv|mlp\.up_proj)|visual\.merger\.mlp\.0|language_model.*q_proj)",
    "qwen3_vl": r".*visual\.(patch_embed\.proj|pos_embed|blocks\.1\.attn\.(qkv|proj)|deepstack_merger_list\.0\.\w+1)",
    "glm4v": r".*visual\.(downsample|blocks\.\d+\.attn\.qkv)",
    "qwen2_5_omni_thinker": r".*visual\.blocks\.\d+\.attn\.(q|v)",
    "kimi_k25": r".*(vision_tower\.layers\.\d+\.attn\.(q_proj|k_proj|proj)|mm_projector\.in_proj)",
    "lfm3_vl": r".*(vision_tower\.layers\.\d+\.self_attn\.(q_proj|k_proj|v_proj)|multi_modal_projector\.linear_1)",
    "minimax_m3_vl": r".*(vision_tower\.layers\.\d+\.self_attn\.q_proj|multi_modal_projector\.merge_linear_1)",
}


def rows_of(model_type: str, checkpoint: Path, adapter: Path, grid: Grid) -> Any:
    """Ours with the adapter merged, ours without, and transformers' with peft's own merge."""
    plain = Rig.of(checkpoint, torch.float32, CPU, sizes=())
    merged = Rig.of(checkpoint, torch.float32, CPU, sizes=(), adapter=Adapter.read("tuned", adapter))
    reference = reference_of(model_type, checkpoint)
    assert isinstance(reference, Reference)
    PeftModel.from_pretrained(reference.model, adapter).merge_and_unload()
    ours, before = (rig.run(rig.items([grid]))[0] for rig in (merged, plain))
    return ours, before, reference.item(grid, plain.pixels(grid, 0))


@pytest.mark.parametrize("model_type", [name for name in ADAPTED if name in MODEL_TYPES])
def test_merged_rows_are_those_of_peft(model_type: str, checkpoints: Checkpoints, tmp_path: Path) -> None:
    folder = checkpoints(model_type)
    trained(reference_of(model_type, folder).model, tmp_path, target_modules=ADAPTED[model_type])
    ours, before, theirs = rows_of(model_type, folder, tmp_path, Grid(1, 8, 12))
    assert error(ours, theirs) <= TOLERANCE
    assert error(ours, before) > 1e-2, "the adapter changes the rows"


@pytest.mark.parametrize(
    "settings",
    [
        {"use_rslora": True},
        {
            "rank_pattern": {r"blocks\.0\.attn\.qkv": 2},
            "alpha_pattern": {r"attn\.qkv": 9, r"blocks\.2\.mlp\.up_proj": 1},
        },
        {"fan_in_fan_out": True},
    ],
    ids=["rslora", "patterns", "fan_in_fan_out"],
)
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to True")
def test_settings_mean_what_they_mean_to_peft(
    settings: dict[str, Any], checkpoints: Checkpoints, tmp_path: Path
) -> None:
    folder = checkpoints("qwen2_5_vl")
    trained(reference_of("qwen2_5_vl", folder).model, tmp_path, target_modules=ADAPTED["qwen2_5_vl"], **settings)
    ours, _, theirs = rows_of("qwen2_5_vl", folder, tmp_path, Grid(1, 8, 12))
    assert error(ours, theirs) <= TOLERANCE


@pytest.fixture(scope="module")
def adapter(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter")
    trained(reference_of("qwen2_5_vl", checkpoints("qwen2_5_vl")).model, folder, target_modules=ADAPTED["qwen2_5_vl"])
    return folder


def load(checkpoint: Path, adapter: Path | None) -> str:
    return broken.load(checkpoint, adapter=Adapter.read("tuned", adapter) if adapter else None).fingerprint


def test_the_fingerprint_tells_adapters_apart(adapter: Path, checkpoints: Checkpoints, tmp_path: Path) -> None:
    checkpoint = checkpoints("qwen2_5_vl")
    other = Path(shutil.copytree(adapter, tmp_path / "other"))
    save_file({key: tensor * 2 for key, tensor in load_file(adapter / WEIGHTS).items()}, other / WEIGHTS)
    prints = [load(checkpoint, chosen) for chosen in (None, adapter, other, adapter)]
    assert len(set(prints)) == 3
    assert prints[1] == prints[3]


def set_config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        content = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps(content | changes))

    return change


def keep(wanted: str) -> Callable[[Path], None]:
    """Of the adapter's weights only those with `wanted` in their names."""

    def change(folder: Path) -> None:
        kept = {key: tensor for key, tensor in load_file(folder / WEIGHTS).items() if wanted in key}
        save_file(kept, folder / WEIGHTS)

    return change


def replace(folder: Path) -> None:
    """As peft does with modules to save."""
    whole = {"base_model.model.model.visual.merger.ln_q.weight": torch.ones(64)}
    save_file({**load_file(folder / WEIGHTS), **whole}, folder / WEIGHTS)


def widen(folder: Path) -> None:
    weights = load_file(folder / WEIGHTS)
    name = next(key for key in sorted(weights) if "visual" in key and key.endswith("lora_B.weight"))
    save_file({**weights, name: torch.cat([weights[name]] * 2)}, folder / WEIGHTS)


def reshape(rank: int | None, kind: torch.dtype = torch.float32, scale: float = 1.0) -> Callable[[Path], None]:
    """Cut factors to a rank, or make them flat, or of another type."""

    def change(folder: Path) -> None:
        weights = load_file(folder / WEIGHTS)
        for name, factor in weights.items():
            cut = factor[:rank] if "lora_A" in name else factor[:, :rank]
            weights[name] = ((factor.flatten() if rank is None else cut) * scale).to(kind).contiguous()
        save_file(weights, folder / WEIGHTS)

    return change


def twice(folder: Path) -> None:
    """Another change of a weight by its name in another layout of the model."""
    weights = load_file(folder / WEIGHTS)
    stem = "base_model.model."
    others = {key.replace(f"{stem}model.", stem): own.clone() for key, own in weights.items() if "visual" in key}
    save_file({**weights, **others}, folder / WEIGHTS)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (reshape(0), r"adapter_model.safetensors: .*lora_[AB].weight is .* of shape .*\b0\b.*, but factors must be"),
        (reshape(None), r"adapter_model.safetensors: .*lora_[AB].weight is .* of shape \(\d+,\), but factors must be"),
        (reshape(4, torch.int32), "is torch.int32 of shape"),
        (reshape(4, scale=1e38), "copy: the factors of .* give values that are not finite"),
        (twice, "adapter_model.safetensors changes .* of the tower twice"),
        (set_config(lora_alpha=None), "adapter_config.json: lora_alpha is None, but must be a finite number"),
        (set_config(lora_alpha=float("nan")), "adapter_config.json: lora_alpha is nan, but must be"),
        (set_config(lora_alpha=10**400), "adapter_config.json: lora_alpha is 10+, but must be"),
        (set_config(alpha_pattern={"qkv": "4"}), "adapter_config.json: alpha_pattern.qkv is '4', but must be"),
        (set_config(alpha_pattern=[1]), "adapter_config.json: alpha_pattern must be an object"),
        (set_config(alpha_pattern={"(": 4}), "adapter_config.json: alpha_pattern cannot be used: .*unterminated"),
        (
            set_config(alpha_pattern={r"([a-z0-9.]+)+x$": 4}),
            "adapter_config.json: alpha_pattern cannot be used: takes more than 5 s of processor time",
        ),
        (set_config(alpha_pattern={"(" * 50_000 + ")" * 50_000: 4}), "adapter_config.json: alpha_pattern cannot be"),
        (set_config(use_dora=True), "use_dora"),
        (set_config(peft_type="LOHA"), "type 'LOHA'"),
        (set_config(bias="all"), "trained biases"),
        (set_config(init_lora_weights="pissa"), "initialised by 'pissa'"),
        (keep("language_model"), "holds no weights of the vision tower"),
        (keep("lora_A"), "only a part of the factors"),
        (widen, "which the tower does not have"),
        (replace, "replaces model.visual.merger.ln_q.weight as a whole"),
        (lambda folder: (folder / WEIGHTS).write_bytes(b"x"), "not a safetensors file"),
        (lambda folder: (folder / WEIGHTS).unlink(), f"holds no {WEIGHTS}"),
        (lambda folder: (folder / "adapter_config.json").unlink(), "holds no adapter_config.json"),
    ],
)
def test_what_cannot_be_merged_is_refused(
    harm: Callable[[Path], Any], message: str, adapter: Path, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(adapter, tmp_path / "copy"))
    harm(folder)
    with pytest.raises(CheckpointError, match=message):
        load(checkpoints("qwen2_5_vl"), folder)
