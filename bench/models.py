"""Vision towers of published and of bench sizes, with random weights, built on a device without a checkpoint."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch
from bench.engine.checkpoint import TOWER
from huggingface_hub import save_torch_state_dict
from torch import Tensor
from transformers import CONFIG_MAPPING

from vitwire_server.core.grids import Grid
from vitwire_server.core.items import DType, Item, Modality, Pixels
from vitwire_server.core.models import Preprocessing
from vitwire_server.demo.saving import write_json
from vitwire_server.demo.shrinking import CLIP, STEPS
from vitwire_server.towers.layouts.packed import PackedTower
from vitwire_server.towers.registry import FAMILIES
from vitwire_server.towers.tower import Tower

PUBLISHED: Mapping[str, tuple[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "Qwen3-VL-8B": ("qwen3_vl", {**TOWER, "out_hidden_size": 4096}),
        "Qwen2.5-VL-7B": (
            "qwen2_5_vl",
            {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 3584}
            | {"fullatt_block_indexes": [7, 15, 23, 31], "window_size": 112, "patch_size": 14},
        ),
        "Qwen2-VL-7B": (
            "qwen2_vl",
            {"depth": 32, "embed_dim": 1280, "hidden_size": 3584, "num_heads": 16, "mlp_ratio": 4, "patch_size": 14},
        ),
    }
)
"""Vision towers as published: model type and the fields of its vision config."""


def shrunk(fields: Mapping[str, Any], depth: int, hidden: int) -> dict[str, Any]:
    """The same tower with other numbers of layers and columns, and heads of 64."""
    small = {**fields, "depth": depth, "num_heads": hidden // 64}
    factor = hidden / fields.get("embed_dim", fields["hidden_size"])
    if "embed_dim" in fields:
        return small | {"embed_dim": hidden, "hidden_size": 2 * hidden}
    small |= {"hidden_size": hidden, "out_hidden_size": 2 * hidden}
    small["intermediate_size"] = int(fields["intermediate_size"] * factor) // 8 * 8
    for key in ("deepstack_visual_indexes", "fullatt_block_indexes"):
        if key in fields:
            small[key] = sorted({index * depth // fields["depth"] for index in fields[key]})
    return small


def build(model_type: str, fields: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> PackedTower:
    """The tower with random weights. Built in `dtype`, never cast to it, so rotary frequencies stay float32."""
    family = FAMILIES[model_type]
    tower_class: Any = family.tower.resolve()
    config_class: Any = type(CONFIG_MAPPING[model_type]().vision_config)
    torch.manual_seed(0)
    with torch.device(device):
        model = tower_class._from_config(config_class(**fields), dtype=dtype, attn_implementation="sdpa")
    model = model.eval().requires_grad_(requires_grad=False).to(device)
    assert all(buffer.dtype is torch.float32 for _, buffer in model.named_buffers()), "rotary frequencies"
    tower = family.build({"tower": model}, SimpleNamespace(vision_config=model.config))
    assert isinstance(tower, PackedTower)
    return tower


def write(model_type: str, fields: Mapping[str, Any], out: Path) -> Any:
    """A checkpoint of the tower alone with random weights, in bfloat16, in shards; returns transformers' tower."""
    family = FAMILIES[model_type]
    config_class: Any = CONFIG_MAPPING[model_type]
    config = config_class(vision_config=dict(fields), dtype="bfloat16")
    torch.manual_seed(0)
    source: Any = family.tower.resolve()
    tower = source._from_config(family.tower.configuration(config), dtype=torch.bfloat16).eval()
    prefix = next(iter(family.tower.prefixes))
    weights = {f"{prefix}{name}": tensor for name, tensor in tower.state_dict().items()}
    out.mkdir(parents=True, exist_ok=True)
    save_torch_state_dict(weights, out, max_shard_size="500MB")
    config.save_pretrained(out)
    sizes = {"shortest_edge": 56**2, "longest_edge": 3584**2}
    write_json(out / "preprocessor_config.json", {**STEPS, **CLIP, "size": sizes})
    return tower


def preprocessing() -> dict[Modality, Preprocessing]:
    """Settings of processors that scale pixels to [-1, 1]; bounds are not used."""
    settings = Preprocessing(1, 1 << 30, (0.5,) * 3, (0.5,) * 3, 1 / 255, 3, bounds_span_frames=False)
    return {Modality.IMAGE: settings, Modality.VIDEO: settings}


def square(tower: PackedTower, side: int, frames: int = 1) -> Grid:
    """The grid of a square image or clip of `side` pixels, rounded down to whole tokens."""
    geometry = tower.geometry
    patches = side // (geometry.patch * geometry.merge) * geometry.merge
    return Grid(-(-frames // geometry.temporal), patches, patches)


def draw(tower: PackedTower, grids: Sequence[Grid]) -> Tensor:
    """Random pixels of all grids in the tower's dtype, on its device, as the processor lays them out."""
    rows = sum(grid.patches for grid in grids)
    columns = tower.geometry.columns(frames=tower.geometry.temporal)
    return torch.randn(rows, columns, dtype=tower.dtype, device=tower.device)


def items(tower: PackedTower, grids: Sequence[Grid], pixels: Tensor) -> list[Item]:
    """The same pixels as the server's items."""
    parts = torch.split(pixels, [grid.patches for grid in grids])
    kinds = [Modality.IMAGE if grid.t == 1 else Modality.VIDEO for grid in grids]
    return [item(tower, *each) for each in zip(grids, parts, kinds, strict=True)]


def item(tower: Tower, grid: Grid, pixels: Tensor, modality: Modality = Modality.IMAGE) -> Item:
    """Pixels of the tower's dtype as an item of the server."""
    dtype = DType.of(str(pixels.dtype).removeprefix("torch."))
    data = bytes(pixels.cpu().contiguous().view(torch.uint8).numpy().data)
    return Item(modality, grid, Pixels(data, dtype, tuple(pixels.shape)), tower.footprint(grid), dtype)


@torch.inference_mode()
def plain(tower: PackedTower, pixels: Tensor, grids: Sequence[Grid]) -> Tensor:
    """The forward of plain transformers, which computes metadata from a tensor of grids."""
    output = tower.model(pixels, grid_thw=torch.tensor(grids, device=tower.device))
    deepstack = output.deepstack_features if tower.geometry.levels else []
    return torch.cat([output.pooler_output, *deepstack], dim=-1)
