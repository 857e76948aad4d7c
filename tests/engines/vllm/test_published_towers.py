"""Towers that only their authors' code defines: our rows, and those of vLLM's modules with the same weights."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench.engine.serving import free_port
from safetensors.torch import load_file
from torch import Tensor, nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.parallel_state import ensure_model_parallel_initialized, init_distributed_environment
from vllm.model_executor.models import kimi_k25_vit, llava_onevision2
from vllm.transformers_utils.configs.kimi_k3 import KimiK3Config

from servers import PYTHON

_ENCODE = """
import sys
from pathlib import Path
import torch
from rigs import Rig
from vitwire_server.core.grids import Grid
from vitwire_server.demo.checkpoint import write_demo_checkpoint
folder, name, *sizes = Path(sys.argv[1]), *sys.argv[2:]
write_demo_checkpoint(name, folder)
rig = Rig.of(folder, torch.float32, torch.device("cpu"), sizes=())
grids = [Grid(*map(int, size.split("x"))) for size in sizes]
items = [{"grid": tuple(grid), "pixels": rig.pixels(grid, 7), "crops": rig.crops(grid, 7)} for grid in grids]
rows = rig.run([rig.item(grid, item["pixels"], item["crops"]) for grid, item in zip(grids, items)])
torch.save([item | {"rows": torch.from_numpy(own)} for item, own in zip(items, rows)], folder / "items")
"""
Rows = Callable[[dict[str, Any], dict[str, Any], "Weights"], Tensor]
"""From an item and config.json."""


class Weights(dict[str, Tensor]):
    """A checkpoint's, by their names in it."""

    def fill(self, module: nn.Module, prefix: str) -> Any:
        """A vLLM module with the weights of this prefix."""
        own = {name.removeprefix(prefix): tensor for name, tensor in self.items() if name.startswith(prefix)}
        module.load_state_dict(own)
        for each in module.modules():
            if method := getattr(each, "quant_method", None):
                method.process_weights_after_loading(each)
        return module.eval()


def kimi_k3(item: dict[str, Any], settings: dict[str, Any], weights: Weights) -> Tensor:
    config = KimiK3Config(**settings)
    tower = weights.fill(kimi_k25_vit.MoonViT3dPretrainedModel(config.vision_config), "vision_tower.")
    names = {"proj.0": "linear_1", "proj.2": "linear_2"}
    own = {name.replace(old, new): each for old, new in names.items() for name, each in weights.items() if old in name}
    projector = kimi_k25_vit.KimiK25MultiModalProjector(config.vision_config, config.text_config.hidden_size)
    weights = Weights(own | {"mm_projector.post_norm.weight": weights["mm_projector.post_norm.weight"]})
    projector = weights.fill(projector, "mm_projector.")
    pixels = item["pixels"].view(-1, 3, 14, 14)
    return kimi_k25_vit.vision_tower_forward(tower, pixels, torch.tensor([item["grid"]]), projector, False)[0]


def onevision2(item: dict[str, Any], settings: dict[str, Any], weights: Weights) -> Tensor:
    vision = SimpleNamespace(**settings["vision_config"])
    tower = llava_onevision2.LlavaOnevision2VisionTower(vision, settings["text_config"]["hidden_size"])
    _, rows, columns = item["grid"]
    info = object.__new__(llava_onevision2.LlavaOnevision2ProcessingInfo)
    info.get_hf_config = lambda: SimpleNamespace(vision_config=vision)
    processor = SimpleNamespace(min_pixels=28 * 28, max_pixels=1 << 20)
    assert len(item["rows"]) == info.get_num_image_tokens(
        image_width=columns * 14, image_height=rows * 14, image_processor=processor
    )
    numbers = torch.arange(rows * columns).view(rows // 2, 2, columns // 2, 2).transpose(1, 2).flatten()
    places = torch.stack([torch.zeros_like(numbers), numbers // columns, numbers % columns], dim=1)
    return weights.fill(tower, "model.visual.")(item["pixels"], torch.tensor([item["grid"]]), places)


TOWERS: dict[str, tuple[Rows, list[str]]] = {
    "kimi_k3": (kimi_k3, ["1x4x6", "1x10x4"]),
    "llava_onevision2": (onevision2, ["1x4x6", "1x10x4"]),
}


@pytest.mark.parametrize("name", TOWERS)
def test_a_published_tower_makes_the_rows_of_vllms(name: str, tmp_path: Path) -> None:
    rows, grids = TOWERS[name]
    subprocess.run([PYTHON, "-c", _ENCODE, str(tmp_path), name, *grids], check=True, capture_output=True)
    weights = Weights()
    for shard in tmp_path.glob("*.safetensors"):
        weights |= {key: tensor.float() for key, tensor in load_file(shard).items()}
    settings = json.loads((tmp_path / "config.json").read_text())
    items = torch.load(tmp_path / "items")
    with set_current_vllm_config(VllmConfig()), torch.inference_mode():
        init_distributed_environment(1, 0, f"tcp://127.0.0.1:{free_port()}", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        for item in items:
            expected = rows(item, settings, weights)
            assert expected.shape == item["rows"].shape
            error = (item["rows"] - expected).abs().max() / expected.abs().max()
            assert error < 1e-5, item["grid"]
