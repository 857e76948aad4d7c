"""Layers of other forms than Qwen's, fused, against stock ones; `make kernel-test` runs them on a CPU."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor

pytest.importorskip("triton")

from tests.gpu.test_kernels import interpreted
from triton import TritonError

from checkpoints import Checkpoints
from reference import norm_error
from rigs import Rig, draw_grids, rows_of
from vitwire_server.runtime.attention.selection import Selection, select
from vitwire_server.runtime.fused import parts
from vitwire_server.runtime.fused.fusing import fuse, fuse_tower
from vitwire_server.runtime.fused.layers import Layer, PackedLayer, Shared, TileLayer
from vitwire_server.runtime.kernels.norms import add_norm
from vitwire_server.runtime.products.tuned import Products
from vitwire_server.towers.tower import Tower

ROUNDINGS = 4
"""Units in the last place that rows may differ by after a few layers."""
FUSED = (
    "llava",
    "vipllava",
    "llava_onevision",
    "internvl",
    "internvl_chat",
    "janus",
    "dinov2",
    "radio",
    "dinov3_vit",
    "vit",
    "aimv2",
    "idefics3",
    "phi4_multimodal",
    "siglip2",
    "idefics2",
    "lfm2_vl",
    "minicpmv",
    "mistral3",
    "kimi_k25",
    "kimi_k3",
    "muse_glimmer",
    "mllama",
    "qwen2_5_omni",
)
"""A row for each form of a layer, each activation, with masks, with kept states and with packed patches."""
RENAMED = {"dinov2": "5.23.0"}
"""The release of transformers since which a layer's parts have the names that are fused."""


@pytest.fixture
def dtype(device: torch.device) -> torch.dtype:
    if device.type != "cuda" and not interpreted():
        pytest.skip("a CPU runs Triton's kernels only in its interpreter: make kernel-test")
    return torch.bfloat16 if device.type == "cuda" else torch.float32


@pytest.mark.parametrize("model_type", FUSED)
def test_a_fused_tower_gives_the_rows_of_the_stock_one(
    model_type: str, dtype: torch.dtype, checkpoints: Checkpoints, device: torch.device
) -> None:
    if Version(transformers.__version__) < Version(RENAMED.get(model_type, "0")):
        pytest.skip(f"its layers had other names before transformers {RENAMED[model_type]}")
    rig = Rig.of(checkpoints(model_type), dtype, device, sizes=(), fused=False)
    items = rig.items(sorted(draw_grids(rig, 1, 9), key=lambda grid: grid.patches)[:3])
    stock = rows_of(rig.engine.launch(items, None).collect())
    attention = attention_of(rig.tower, dtype, device) if rig.tower.segmented else None
    assert fuse_tower(rig.tower, attention) == len(rig.tower.blocks)
    calls = [counted(block) for block in rig.tower.blocks]
    fused = rows_of(rig.engine.launch(items, None).collect())
    assert all(calls), "the tower calls each of its fused layers"
    errors = [norm_error(own, expected) for own, expected in zip(fused, stock, strict=True)]
    assert np.mean(errors) <= ROUNDINGS * max(1e-6, torch.finfo(dtype).eps)


@pytest.mark.parametrize("model_type", ["internvl", "radio", "dinov3_vit"])
def test_the_norm_after_a_scaled_addition_is_one_kernel_with_it(
    model_type: str, dtype: torch.dtype, checkpoints: Checkpoints, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig.of(checkpoints(model_type), dtype, device, sizes=(), fused=False)
    assert fuse_tower(rig.tower, None) == len(rig.tower.blocks) > 1
    alone = norms_alone(monkeypatch)
    rows_of(rig.engine.launch(rig.items(draw_grids(rig, 1, 1)), None).collect())
    assert alone == [True] + [False] * (2 * len(rig.tower.blocks) - 1), "two norms a block, but for the first"


@torch.inference_mode()
def test_a_forward_on_another_thread_leaves_the_norms_computed_ahead(
    checkpoints: Checkpoints, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread captures while another runs eager forwards."""
    first, second, *_ = blocks = Rig.of(checkpoints("internvl"), dtype, device, sizes=(), fused=False).tower.blocks
    rows = torch.randn(2, 24, first.lambda_1.shape[0], generator=torch.Generator().manual_seed(3)).to(device, dtype)
    assert fuse(blocks, None) == len(blocks)
    between = first(rows)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(torch.inference_mode()(lambda: second(first(2 * rows)))).result()
    alone = norms_alone(monkeypatch)
    second(between)
    assert alone == [False] * len(alone)


@torch.inference_mode()
@pytest.mark.parametrize("between", [lambda rows: rows, lambda rows: rows * 2, lambda rows: rows[:1]])
def test_a_norm_computed_ahead_is_taken_for_the_same_rows_only(
    between: Callable[[Tensor], Tensor], dtype: torch.dtype, checkpoints: Checkpoints, device: torch.device
) -> None:
    first, second, *_ = blocks = Rig.of(checkpoints("internvl"), dtype, device, sizes=(), fused=False).tower.blocks
    rows = torch.randn(2, 24, first.lambda_1.shape[0], generator=torch.Generator().manual_seed(3)).to(device, dtype)
    expected = second(between(first(rows)))
    assert fuse(blocks, None) == len(blocks)
    for _ in range(2):
        got = second(between(first(rows)))
        error = norm_error(got.float().cpu().numpy(), expected.float().cpu().numpy())
        assert error <= ROUNDINGS * max(1e-6, torch.finfo(dtype).eps)


def norms_alone(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Gets whether a norm is computed without an addition, for each norm from now on."""
    alone: list[bool] = []

    def counting(hidden: Tensor, added: Tensor | None, *rest: Any, **named: Any) -> Any:
        alone.append(added is None)
        return add_norm(hidden, added, *rest, **named)

    monkeypatch.setattr(parts, "add_norm", counting)
    return alone


def attention_of(tower: Tower, dtype: torch.dtype, device: torch.device) -> Selection:
    """The attention backend of a tower of packed patches, which it uses from now on."""
    heads, resampler = tower.attention_heads, tower.resampler_heads
    attention = select("auto", device, dtype, *heads, captured=False, resampler=resampler)
    tower.use_attention(attention.implementation)
    return attention


def counted(block: torch.nn.Module) -> list[int]:
    """Gets an element at each call of a block."""
    calls, forward = [], block.forward

    def counting(*arguments: Any, **named: Any) -> Any:
        calls.append(1)
        return forward(*arguments, **named)

    block.forward = counting
    return calls


@torch.inference_mode()
def test_a_layer_that_computes_more_is_left_alone(
    dtype: torch.dtype, checkpoints: Checkpoints, device: torch.device
) -> None:
    tower = Rig.of(checkpoints("llava"), dtype, device, sizes=(), fused=False).tower
    first: Any = tower.blocks[0]
    first.self_attn.extra = torch.nn.Linear(2, 2)
    assert fuse(tower.blocks, None) == len(tower.blocks) - 1
    assert "forward" not in vars(first)


@torch.inference_mode()
def test_a_layer_whose_attention_takes_more_is_left_alone(
    dtype: torch.dtype, checkpoints: Checkpoints, device: torch.device
) -> None:
    """Layers pass other arguments on by keyword: MiniMax's has the form of SigLIP's, but rotary positions."""
    tower = Rig.of(checkpoints("minimax_m3_vl"), dtype, device, sizes=(), fused=False).tower
    blocks: Any = tower.blocks
    for block in blocks:
        block.self_attn.scale = block.self_attn.scaling
    assert fuse(blocks, attention_of(tower, dtype, device)) == 0


@torch.inference_mode()
@pytest.mark.parametrize("failure", [TritonError("no such register"), RuntimeError("lost")])
def test_a_layer_whose_kernels_fail_is_left_alone(
    failure: Exception,
    dtype: torch.dtype,
    checkpoints: Checkpoints,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def failing(*_: object, **__: object) -> None:
        raise failure

    tower = Rig.of(checkpoints("llava"), dtype, device, sizes=(), fused=False).tower
    monkeypatch.setattr(Products, "linear", failing)
    assert fuse(tower.blocks, None) == 0
    assert [record.levelname for record in caplog.records if str(failure) in record.message] == ["WARNING"]


@torch.inference_mode()
@pytest.mark.parametrize("model_type", ["llava", "internvl", "dinov3_vit", "siglip2", "mistral3"])
def test_a_layer_does_not_write_to_its_input(
    model_type: str, dtype: torch.dtype, checkpoints: Checkpoints, device: torch.device
) -> None:
    """Towers keep the states of several layers."""
    tower = Rig.of(checkpoints(model_type), dtype, device, sizes=(), fused=False).tower
    stock = tower.blocks[0]
    if tower.segmented:
        layer: Layer = PackedLayer(stock, attention_of(tower, dtype, device), Shared(Products()), first=True)
    else:
        layer = TileLayer(stock, Shared(Products()), first=True)
    rows = torch.randn(2, 24, layer.parts.columns, generator=torch.Generator().manual_seed(3)).to(device, dtype)
    before = rows.clone()
    assert layer.compared(stock, rows)
    torch.testing.assert_close(rows, before, rtol=0, atol=0)


@torch.inference_mode()
def test_a_layer_that_is_wrong_is_not_used(
    dtype: torch.dtype, checkpoints: Checkpoints, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    tower = Rig.of(checkpoints("llava"), dtype, device, sizes=(), fused=False).tower
    monkeypatch.setattr(Products, "linear", lambda _, rows, weight, __, **___: rows @ weight.t())
    for block in tower.blocks:
        for name, own in block.named_parameters():
            if name.endswith("bias"):
                own.fill_(1.0)
    assert fuse(tower.blocks, None) == 0


@torch.inference_mode()
def test_the_mask_is_added_to_scores(dtype: torch.dtype, checkpoints: Checkpoints, device: torch.device) -> None:
    tower = Rig.of(checkpoints("idefics3"), dtype, device, sizes=(), fused=False).tower
    stock: Any = tower.blocks[0]
    layer = TileLayer(stock, Shared(Products()), first=True)
    rows = torch.randn(2, 16, layer.parts.columns, generator=torch.Generator().manual_seed(3)).to(device, dtype)
    mask = torch.zeros(2, 1, 1, 16, device=device, dtype=dtype)
    mask[1, ..., 10:] = -torch.inf
    mask = mask.expand(-1, 1, 16, -1)
    expected, whole = stock(rows, mask), stock(rows, None)
    got = layer(rows.clone(), mask)
    assert norm_error(got.float().cpu().numpy(), expected.float().cpu().numpy()) <= max(1e-5, torch.finfo(dtype).eps)
    assert norm_error(whole[1].float().cpu().numpy(), expected[1].float().cpu().numpy()) > 0.01


def test_threads_do_not_share_values_of_a_forward() -> None:
    """One thread captures while another runs eager forwards."""
    shared, source = Shared(Products()), object()
    assert shared.of(source, lambda: "captured") == "captured"

    def forward() -> tuple[str, Products]:
        shared.clear()
        return shared.of(source, lambda: "eager"), shared.products

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(forward).result() == ("eager", shared.products)
    assert shared.of(source, lambda: "made again") == "captured"


@torch.inference_mode()
def test_rows_may_lie_in_columns(dtype: torch.dtype, checkpoints: Checkpoints, device: torch.device) -> None:
    """As those of one tile do after a convolution."""
    tower = Rig.of(checkpoints("llava_onevision"), dtype, device, sizes=(), fused=False).tower
    layer = TileLayer(tower.blocks[0], Shared(Products()), first=True)
    rows = torch.randn(1, layer.parts.columns, 16, generator=torch.Generator().manual_seed(3)).to(device, dtype)
    got, expected = layer(rows.transpose(1, 2)), layer(rows.transpose(1, 2).contiguous())
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


class Projections(torch.nn.Module):
    """CLIP's MLP under the names of DINOv3's."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.up_proj, self.act_fn, self.down_proj = mlp.fc1, mlp.activation_fn, mlp.fc2

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.up_proj(rows)))


@torch.inference_mode()
def test_an_mlp_under_other_names(dtype: torch.dtype, checkpoints: Checkpoints, device: torch.device) -> None:
    blocks: list[Any] = list(Rig.of(checkpoints("llava"), dtype, device, sizes=(), fused=False).tower.blocks)
    for block in blocks:
        block.mlp = Projections(block.mlp)
    assert fuse(blocks, None) == len(blocks)
