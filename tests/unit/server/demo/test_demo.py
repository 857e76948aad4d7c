"""Demo checkpoints: the same arguments write the same bytes, whatever was drawn or written before."""

import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, PreTrainedConfig

from servers import finished
from vitwire_server.demo.checkpoint import demo_config, write_demo_checkpoint
from vitwire_server.demo.models import DEMO_MODELS
from vitwire_server.demo.shrinking import shrunk
from vitwire_server.towers.registry import FAMILIES


@pytest.mark.parametrize(("umask", "mode"), [("022", 0o644), ("077", 0o600)])
def test_files_have_the_mode_that_the_umask_gives(umask: str, mode: int, tmp_path: Path) -> None:
    """Another user reads them in a container, if the umask lets it."""
    before = os.umask(int(umask, 8))
    try:
        write_demo_checkpoint("qwen3_vl", tmp_path)
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {mode}


def test_the_command_says_where_it_wrote(tmp_path: Path) -> None:
    done = finished("demo-checkpoint", "--model-type", "qwen3_vl", "--out", tmp_path / "new")
    assert (done.returncode, done.stdout) == (0, f"{tmp_path}/new\n"), done.stderr
    assert (tmp_path / "new" / "config.json").exists()


def written(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("model_type", "other"),
    [("paddleocr_vl", "qwen3_5"), ("qwen3_5", "qwen2_vl"), ("siglip2", "llava-pixtral"), ("deepseek_ocr2", "gemma3")],
)
def test_the_same_arguments_write_the_same_bytes(model_type: str, other: str, tmp_path: Path) -> None:
    before = torch.random.get_rng_state()
    write_demo_checkpoint(model_type, tmp_path / "first")
    assert torch.equal(torch.random.get_rng_state(), before), "what others draw is not touched"
    torch.manual_seed(5)
    write_demo_checkpoint(other, tmp_path / "other")
    write_demo_checkpoint(model_type, tmp_path / "second")
    assert written(tmp_path / "first") == written(tmp_path / "second")
    write_demo_checkpoint(model_type, tmp_path / "third", seed=1)
    assert written(tmp_path / "third").keys() == written(tmp_path / "first").keys()
    assert written(tmp_path / "third") != written(tmp_path / "first")


def test_every_row_of_the_table_of_models_has_a_demo_model() -> None:
    assert DEMO_MODELS.keys() == FAMILIES.keys()


def vision(model_type: str) -> Any:
    return FAMILIES[model_type].tower.configuration(demo_config(model_type))


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen2_5_omni", "hyperclovax_vision_v2", "deepseek_vl_hybrid"])
def test_towers_with_windows_have_blocks_without(model_type: str) -> None:
    tower = vision(model_type)
    if model_type == "deepseek_vl_hybrid":
        tower = demo_config(model_type).high_res_vision_config
    without = list(getattr(tower, "fullatt_block_indexes", None) or tower.global_attn_indexes)
    assert 0 < len(without) < tower.num_hidden_layers
    assert max(without) < tower.num_hidden_layers


@pytest.mark.parametrize("model_type", ["muse_glimmer", "muse_spark", "lfm3_vl"])
def test_towers_have_layers_of_each_kind(model_type: str) -> None:
    tower, usual = vision(model_type), CONFIG_MAPPING[model_type]().vision_config
    assert set(tower.layer_types) == set(usual.layer_types)
    assert len(tower.layer_types) == tower.num_hidden_layers < usual.num_hidden_layers


@pytest.mark.parametrize("model_type", ["qwen3_vl", "qwen3_omni_moe_thinker", "cosmos3_omni", "granite_docling"])
def test_deepstack_is_taken_of_several_layers(model_type: str) -> None:
    tower = vision(model_type)
    taken = list(tower.deepstack_visual_indexes)
    assert 1 < len(taken) < tower.num_hidden_layers
    assert taken == sorted(set(taken))
    assert max(taken) < tower.num_hidden_layers


def test_a_model_that_nothing_is_written_down_of_is_small_and_keeps_its_structure() -> None:
    kind = CONFIG_MAPPING["exaone4_5"]
    usual, small = (config(kind, given) for given in ({}, shrunk(kind, {})))
    assert small.vision_config.hidden_size < usual.vision_config.hidden_size / 10
    assert small.text_config.vocab_size < usual.text_config.vocab_size / 10
    assert small.vision_config.fullatt_block_indexes == [1, 3]
    assert small.vision_config.num_key_value_heads < small.vision_config.num_attention_heads, "as of published towers"
    assert set(small.text_config.layer_types) == set(usual.text_config.layer_types)
    assert len(small.text_config.layer_types) == small.text_config.num_hidden_layers
    for field in ("patch_size", "spatial_merge_size", "temporal_patch_size", "window_size"):
        assert getattr(small.vision_config, field) == getattr(usual.vision_config, field)


def test_what_is_written_down_is_not_shrunk() -> None:
    kind = CONFIG_MAPPING["qwen3_vl"]
    given = {"vision_config": {"depth": 6, "hidden_size": 512}, "image_token_id": 77}
    made = config(kind, shrunk(kind, given))
    assert (made.vision_config.depth, made.vision_config.hidden_size, made.image_token_id) == (6, 512, 77)
    assert made.vision_config.deepstack_visual_indexes == [1, 3, 5], "in the same shares of six layers"
    assert made.vision_config.num_heads == 4


def config(kind: type[PreTrainedConfig], arguments: dict[str, Any]) -> Any:
    return kind(**arguments)
