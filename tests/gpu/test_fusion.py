"""Blocks whose forward is ours against the stock ones; `make kernel-test` runs them on a CPU."""

from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

from bench.models import PUBLISHED, build, draw, items, preprocessing, shrunk
from tests.gpu.test_kernels import distance, interpreted

from vitwire_server.core.budgets import Ladder
from vitwire_server.core.grids import Grid
from vitwire_server.runtime.attention.selection import LoadedBackend, Selection, select
from vitwire_server.runtime.engine import Engine
from vitwire_server.runtime.fused.fusing import fuse
from vitwire_server.runtime.fused.layers import Block, Shared
from vitwire_server.runtime.fused.surroundings import hasten_mergers, hasten_positions
from vitwire_server.runtime.graphs import CudaRecorder, GraphSet, SimulatedRecorder
from vitwire_server.runtime.memory.streams import CudaStreams, HostStreams
from vitwire_server.runtime.products.tuned import Products
from vitwire_server.runtime.staging import Stager
from vitwire_server.towers.layouts.packed import PackedTower

GRIDS = [Grid(1, 8, 12), Grid(2, 6, 4), Grid(1, 2, 2), Grid(1, 14, 18)]
DEPTH = 2


@pytest.fixture(scope="module", params=list(PUBLISHED))
def tower(request: pytest.FixtureRequest, device: torch.device) -> PackedTower:
    if device.type != "cuda" and not interpreted():
        pytest.skip("a CPU runs Triton's kernels only in its interpreter: make kernel-test")
    model_type, fields = PUBLISHED[request.param]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return build(model_type, shrunk(fields, DEPTH, 1152 if device.type == "cuda" else 144), dtype, device)


@pytest.fixture(scope="module")
def attention(tower: PackedTower, device: torch.device) -> Selection:
    from vitwire_server.runtime.kernels.attention import segment_attention  # noqa: PLC0415 - after the skip

    name = "auto" if device.type == "cuda" else "sdpa"
    choice = select(name, device, tower.dtype, *tower.attention_heads, captured=False)
    tower.use_attention(choice.implementation)
    return (
        Selection.only(LoadedBackend("triton", segment_attention), "to be tested") if device.type == "cpu" else choice
    )


@torch.inference_mode()
def test_a_fused_tower_gives_the_rows_of_the_stock_one(
    tower: PackedTower, attention: Selection, device: torch.device
) -> None:
    streams = CudaStreams(device) if device.type == "cuda" else HostStreams()
    recorder = CudaRecorder(streams.compute) if isinstance(streams, CudaStreams) else SimulatedRecorder()
    batch = items(tower, GRIDS, draw(tower, GRIDS))
    budget = tower.budget(160, max_items=8, max_frames=16)

    def rows(*, captured: bool) -> list[torch.Tensor]:
        graphs = GraphSet(tower, Ladder((budget,) if captured else ()), recorder)
        engine = Engine(tower, graphs, Stager(tower.geometry, preprocessing(), device), streams)
        results = engine.launch(batch, budget if captured else None).collect().results
        assert not any(isinstance(result, Exception) for result in results), results
        return [torch.frombuffer(bytearray(each.data), dtype=tower.dtype).view(each.shape) for each in results]

    stock = rows(captured=False)
    assert fuse(tower.blocks, attention) == DEPTH
    assert hasten_positions(tower.model) is (tower.family.model_type == "qwen3_vl")
    if device.type == "cuda":
        hasten_mergers(tower.model, tower.blocks)
    for captured in (False, True):
        for own, expected in zip(rows(captured=captured), stock, strict=True):
            assert distance(own, expected) <= max(1e-5, 2 * torch.finfo(tower.dtype).eps)


@torch.inference_mode()
def test_a_backend_that_is_wrong_in_one_band_is_not_fused(tower: PackedTower, attention: Selection) -> None:
    right = attention.at(1)
    # Backends of one name are compared once; layers call Triton's kernel directly.
    other = "sdpa" if right.name == "varlen" else "varlen"
    wrong = LoadedBackend(other, lambda q, *_: torch.full_like(q, torch.nan))
    for position in range(4):
        bands = tuple(wrong if each == position else right for each in range(4))
        assert fuse(tower.blocks, Selection(bands, "to be tested")) == 0


@torch.inference_mode()
def test_a_fused_block_contains_what_its_backend_spreads(
    tower: PackedTower, attention: Selection, device: torch.device
) -> None:
    right = attention.at(1)

    def spreading(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> torch.Tensor:
        """As flash attention: rows of other segments count as 0, but they count."""
        return right.attend(q, k, v, *rest) + 0 * v.sum(0)

    ends = torch.tensor([0, 16, 32], dtype=torch.int32, device=device)
    for name, contained in (("fa4", True), ("varlen", False)):
        stock: Any = tower.blocks[0]
        block = Block(stock, Selection.only(LoadedBackend(name, spreading), ""), Shared(Products()), first=True)
        rows = torch.zeros(32, stock.attn.qkv.in_features, dtype=tower.dtype, device=device)
        rows[:16] = torch.nan
        angles = torch.zeros(32, tower.attention_heads[1], device=device)
        out = block(rows, ends, (angles.cos(), angles.sin()), 16)
        assert out[:16].isnan().all()
        assert bool(out[16:].isfinite().all()) is contained


def test_blocks_of_another_form_are_left_alone(attention: Selection) -> None:
    assert fuse([nn.TransformerEncoderLayer(8, 2)], attention) == 0
