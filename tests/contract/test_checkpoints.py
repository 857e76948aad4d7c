"""Checkpoints that are broken in the ways they are: one sentence that names the file, never a traceback."""

import json
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from broken import Break, config, edit, load, refused, write
from checkpoints import Checkpoints
from vitwire_server.towers.checkpoints.checkpoint import open_checkpoint
from vitwire_server.towers.files import CheckpointError
from vitwire_server.towers.registry import FAMILIES

INDEX = "model.safetensors.index.json"
PREPROCESSOR = "preprocessor_config.json"


def single_garbage(folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink()
    (folder / "model.safetensors").write_bytes(b"garbage")


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "holds no config.json"),
        (write("config.json", "{"), "cannot be read as JSON"),
        (write("config.json", "[]"), "holds no JSON object"),
        (write("config.json", "[" * 100_000), "cannot be read as JSON"),
        (config(vision_config=None), "depth is 32, but the checkpoint holds weights of 4 layers"),
        (config(vision_config=[1]), "Qwen2.5-VL configuration"),
        (config(dtype="float64", vision_config__dtype="float64"), "float64|configuration"),
        (config(vision_config__hidden_size=96), "do not fit|vision tower cannot be built"),
        (config(vision_config__depth=9), "depth is 9, but the checkpoint holds weights of 4 layers"),
        (config(vision_config__depth=3), "unexpected keys"),
        (config(vision_config__num_heads=0), "vision_config.num_heads is 0, but must be positive"),
        (config(vision_config__hidden_act="no_such"), "vision tower cannot be built|configuration"),
        (write(INDEX, "{}"), "holds no weight_map"),
        (edit(INDEX, weight_map=[1, 2]), "holds no weight_map"),
        (edit(INDEX, weight_map={"visual.x": 5}), "holds no weight_map"),
        (edit(INDEX, weight_map={"lm_head.weight": "model-00001-of-00005.safetensors"}), "holds no vision tower"),
        (lambda folder: (folder / INDEX).unlink(), "holds no weights: none of model.safetensors.index.json"),
        (single_garbage, "is not a safetensors file"),
        (lambda folder: (folder / PREPROCESSOR).unlink(), "holds no preprocessor_config.json"),
        (edit(PREPROCESSOR, image_mean=[0.5]), "3 channels"),
        (edit(PREPROCESSOR, image_std=[0.5, 0.0, 0.5]), "must be finite"),
        (edit(PREPROCESSOR, image_mean=[float("nan")] * 3), "must be finite"),
        (edit(PREPROCESSOR, size={"shortest_edge": 9, "longest_edge": 3}), "must satisfy 0 < min_pixels"),
        (edit(PREPROCESSOR, size={}), "shortest_edge.* is missing"),
        (edit(PREPROCESSOR, resample=99), "not a filter"),
        (write("processor_config.json", '{"image_processor": 5}'), "processor_config.json"),
    ],
)
def test_what_is_broken_is_named(harm: Break, message: str, copied: Checkpoints) -> None:
    assert "copy" in refused(copied("qwen2_5_vl"), harm, message)


@pytest.mark.parametrize(
    ("model_type", "harm", "message"),
    [
        ("qwen2_5_vl", config(vision_config__window_size=14), "vision_config.window_size is 14, but must be at least"),
        (
            "qwen2_5_omni",
            config(thinker_config__vision_config__window_size=27),
            "thinker_config.vision_config.window_size is 27",
        ),
        (
            "kimi_k25",
            config(vision_config__merge_kernel_size=[1, 2]),
            r"merge_kernel_size is \[1, 2\], but must be two equal sides",
        ),
        ("kimi_vl", config(vision_config__merge_kernel_size=[1, 2]), r"merge_kernel_size is \[1, 2\]"),
        (
            "ernie4_5_vl_moe",
            config(vision_config__temporal_merge_size=3),
            "vision_config.temporal_merge_size is 3, but must be 2",
        ),
        ("qwen3_vl", config(vision_config__depth=100_000_000), "depth is 100000000, but must be at most"),
        ("dots_ocr", config(vision_config__post_norm=False), "vision_config.post_norm is False, but must be True"),
        (
            "ovis2_5",
            config(vit_config__fullatt_block_indexes="1|2"),
            "fullatt_block_indexes is '1|2', but must be None",
        ),
        (
            "qwen3_omni_moe",
            config(code2wav_config__num_hidden_layers=100_000_000),
            "code2wav_config.num_hidden_layers is 100000000",
        ),
        (
            "idefics2",
            config(perceiver_config__resampler_depth=100_000_000),
            "perceiver_config.resampler_depth is 100000000, but must be at most",
        ),
        ("mllama", config(vision_config__num_global_layers=100_000_000), "num_global_layers is 100000000"),
        ("florence2", config(vision_config__depths=[1, 100_000_000, 1, 1]), r"depths is \[1, 100000000"),
        (
            "minicpmv",
            config(vision_config__num_attention_heads=-1),
            "vision_config.num_attention_heads is -1, but must be positive",
        ),
        ("florence2", config(vision_config__num_groups=[1, 0, 1, 1]), "vision_config.num_groups is .1, 0"),
        ("florence2", config(vision_config__window_size=0), "vision_config.window_size is 0, but must"),
        (
            "mllama",
            config(vision_config__intermediate_layers_indices=[0]),
            r"vision_config.intermediate_layers_indices is \[0\], but must",
        ),
        ("mllama", config(vision_config__intermediate_layers_indices=[0, 9]), "indices is .0, 9., but must"),
        ("phi4mm", config(vision_config__feature_layer=9), "vision_config.feature_layer is 9, but must"),
        ("phi4mm", config(vision_config__hidden_size=65), "vision tower cannot be built: embed_dim must"),
        ("aria", config(projector_patch_to_query_dict__100=-1), "projector_patch_to_query_dict is .*100: -1"),
        ("qwen3_vl", config(vision_config__depth=9999), "depth is 9999, .* weights of 4 layers"),
        (
            "deepseek_ocr2",
            config(vision_config__sam_config__num_hidden_layers=9999),
            "vision_config.sam_config.num_hidden_layers is 9999, .* weights of 3 layers",
        ),
        (
            "deepseek_vl_hybrid",
            config(high_res_vision_config__num_hidden_layers=9999),
            "high_res_vision_config.num_hidden_layers is 9999, .* weights of 3 layers",
        ),
        ("kimi_k25", config(vision_config__num_attention_heads=0), "num_attention_heads is 0, but must be"),
        ("kimi_k3", config(vision_config__norm_type="layernorm"), "vision_config.norm_type is 'layernorm'"),
        ("moondream3", config(config__vision__enc_n_layers=3), "enc_n_layers is 3, but must be crop_size / .*, 4"),
        ("moondream3", config(config__vision__overlap_margin=2), "overlap_margin is 2, but must be from 0 to 1"),
        ("moondream3", config(config__vision__max_crops="x"), "config.vision.max_crops is 'x', but must be from 1"),
        ("llava_onevision2", config(vision_config__num_attention_heads=3), "hidden_size is 64, but must be heads of"),
        ("videollama3_qwen2", config(mm_projector_type="linear"), "mm_projector_type is 'linear', but must"),
        (
            "videollama3_qwen2",
            write("processor_config.json", '{"video_merge_size": 3}'),
            "copy/processor_config.json: video_merge_size is 3, but must be 2",
        ),
        (
            "video_llama_3",
            edit(PREPROCESSOR, merge_size=2),
            "/preprocessor_config.json: merge_size is 2, but must be 1",
        ),
        (
            "video_llama_3",
            edit("video_preprocessor_config.json", merge_size=1),
            "video_preprocessor_config.json: merge_size is 1, but must be 2",
        ),
    ],
)
def test_a_value_that_is_not_served_is_named(model_type: str, harm: Break, message: str, copied: Checkpoints) -> None:
    assert "copy" in refused(copied(model_type), harm, message)


@pytest.mark.parametrize(
    ("model_type", "weight", "sides"),
    [
        ("kimi_k25", "patch_embed.pos_emb.weight", ("pos_emb_height", "pos_emb_width")),
        ("kimi_vl", "patch_embed.pos_emb.weight", ("init_pos_emb_height", "init_pos_emb_width")),
    ],
)
def test_a_table_of_positions_that_is_no_square_is_refused(
    model_type: str, weight: str, sides: tuple[str, str], copied: Checkpoints
) -> None:
    """Even where the weights fit: transformers resamples such a table as if it were a square."""
    folder = copied(model_type)
    shard = next(folder / s for name, s in load_index(folder).items() if name.endswith(weight))
    tensors = load_file(shard)
    tensors |= {name: own.view(4, 16, -1) for name, own in tensors.items() if name.endswith(weight)}
    save_file(tensors, shard)
    config(**{f"vision_config__{side}": n for side, n in zip(sides, (4, 16), strict=True)})(folder)
    with pytest.raises(CheckpointError, match=rf"vision_config\.{sides[1]} is 16, but must be"):
        load(folder)


def cut(length: Callable[[bytes], int]) -> Callable[[Path], None]:
    """Cut a shard to the length that follows from its bytes."""

    def shorter(shard: Path) -> None:
        raw = shard.read_bytes()
        shard.write_bytes(raw[: length(raw)])

    return shorter


def header(raw: bytes) -> int:
    """Bytes of a shard up to its first tensor."""
    return 8 + int.from_bytes(raw[:8], "little")


def requantise(shard: Path) -> None:
    tensors = load_file(shard)
    name = min(name for name in tensors if "visual." in name)
    save_file({**tensors, name: tensors[name].to(torch.float8_e4m3fn)}, shard)


def reshape(shard: Path) -> None:
    tensors = load_file(shard)
    name = next(name for name in sorted(tensors) if name.endswith("attn.qkv.weight"))
    save_file({**tensors, name: tensors[name].flatten()[None]}, shard)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (cut(lambda _: 0), "is not a safetensors file"),
        (cut(lambda raw: header(raw) - 1), "is not a safetensors file"),
        (cut(header), "is not a safetensors file"),
        (cut(lambda raw: len(raw) // 2), "or is not complete: download it again"),
        (cut(lambda raw: len(raw) - 1), "is not a safetensors file"),
        (
            lambda shard: shutil.copy(shard.with_name(re.sub(r"\d+", "00001", shard.name, count=1)), shard),
            "does not contain tensor",
        ),
        (lambda shard: shard.write_bytes(b"version https://git-lfs.github.com/spec/v1\n"), "pointer of Git LFS"),
        (requantise, "is quantised"),
    ],
    ids=["empty", "header", "no-tensors", "half", "one-byte", "another-shard", "pointer", "quantised"],
)
def test_a_shard_with_weights_of_the_tower_that_is_not_whole_is_named(
    harm: Callable[[Path], Any], message: str, copied: Checkpoints
) -> None:
    folder = copied("qwen2_5_vl")
    shard = min(name for key, name in load_index(folder).items() if "visual." in key)
    harm(folder / shard)
    with pytest.raises(CheckpointError, match=message) as error:
        load(folder)
    assert str(folder / shard) in str(error.value)


def test_a_weight_of_another_shape_is_named(copied: Checkpoints) -> None:
    folder = copied("qwen2_5_vl")
    reshape(folder / next(s for key, s in load_index(folder).items() if key.endswith("attn.qkv.weight")))
    with pytest.raises(CheckpointError, match=r"attn.qkv.weight is of shape \(1, 12288\), .* asks for \(192, 64\)"):
        load(folder)


def load_index(folder: Path) -> dict[str, str]:
    weight_map: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
    return weight_map


def test_a_transformers_that_is_too_old_is_told_of_in_one_sentence(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = FAMILIES["qwen2_vl"]
    monkeypatch.setattr(transformers, "__version__", "5.16.2")
    with pytest.raises(
        CheckpointError, match=f"needs transformers {family.transformers} or newer, 5.16.2 is installed"
    ):
        open_checkpoint(str(checkpoints("qwen2_vl")))


def test_what_the_installed_transformers_lacks_is_skipped_by_name(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPU tests run with a release that the machine has."""
    monkeypatch.setattr(transformers, "__version__", "5.17.0")
    with pytest.raises(pytest.skip.Exception, match=r"radio needs transformers 5.23.0, 5.17.0 is installed"):
        checkpoints("radio")


@pytest.mark.parametrize(("installed", "lines"), [("5.17.0", 0), ("5.24.0", 0), ("5.24.1", 1), ("6.0.0.dev0", 1)])
def test_a_transformers_that_is_newer_than_tested_is_one_log_line(
    installed: str,
    lines: int,
    checkpoints: Checkpoints,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(transformers, "__version__", installed)
    open_checkpoint(str(checkpoints("qwen2_vl")))
    assert [record.getMessage() for record in caplog.records if record.name.startswith("vitwire_server")] == [
        f"transformers {installed} is newer than 5.24.0, the newest that was tested"
    ] * lines


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "kimi_k25", "llava_onevision", "step3p7"])
@pytest.mark.parametrize("value", [0, 100_000_000])
@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_no_number_of_a_configuration_ends_in_a_traceback(model_type: str, value: int, copied: Checkpoints) -> None:
    """It loads, or is refused by a sentence."""
    folder = copied(model_type)
    whole = (folder / "config.json").read_text()
    vision = json.loads(whole)["vision_config"]
    for field in (name for name, number in vision.items() if type(number) in (int, float)):
        (folder / "config.json").write_text(whole)
        config(**{f"vision_config__{field}": value})(folder)
        with suppress(CheckpointError):
            load(folder)
