"""Float8 kernels and blocks against what they stand for; `make kernel-test` runs them on a CPU."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")

from bench.models import PUBLISHED, build, shrunk
from tests.gpu.test_kernels import distance, interpreted
from triton import language as tl
from triton.runtime import interpreter

from vitwire_server.runtime.attention.selection import LoadedBackend, Selection, select
from vitwire_server.runtime.fused.fusing import fuse
from vitwire_server.runtime.kernels.attention import segment_attention
from vitwire_server.runtime.kernels.norms import Norm, add_norm, add_norm_quantise
from vitwire_server.runtime.kernels.operands import SMALLEST, Scaled
from vitwire_server.runtime.kernels.quantise import activate_quantise, quantise
from vitwire_server.runtime.kernels.rowwise import KINDS, activate
from vitwire_server.runtime.precision.float8 import Float8Linear, device_fault, reduce, replacements
from vitwire_server.towers.layouts.packed import PackedTower

DEPTH = 2
ROUNDING = 2**-4
"""Of a value with 3 bits of mantissa, relative to it: half a unit in the last place."""


@pytest.fixture(autouse=True)
def where(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if device.type != "cuda" and not interpreted():
        pytest.skip("a CPU runs Triton's kernels only in its interpreter: make kernel-test")
    if fault := device_fault(device):
        pytest.skip(fault)
    if interpreted():
        monkeypatch.setattr(interpreter, "_convert_float", rounded(interpreter._convert_float))


def rounded(convert: Any) -> Any:
    """Triton 3.9's interpreter drops the carry when it rounds to float8: 127 becomes 64, not 128. torch rounds."""

    def converted(values: Any, before: Any, after: Any, mode: Any) -> Any:
        if after is not tl.float8e4nv or before is not tl.float32:
            return convert(values, before, after, mode)
        return torch.from_numpy(values).to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    return converted


@pytest.fixture
def dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def close(got: Scaled, expected: Tensor, dtype: torch.dtype) -> None:
    """Each value is within a rounding of what was expected, which was itself rounded to `dtype`."""
    scales = expected.float().abs().amax(1, keepdim=True).clamp(min=SMALLEST) / 448
    torch.testing.assert_close(got.scales, scales, rtol=2 * torch.finfo(dtype).eps, atol=0)
    error = (got.values.float() * got.scales - expected.float()).abs()
    allowed = (ROUNDING + 4 * torch.finfo(dtype).eps) * expected.float().abs() + 2**-10 * scales
    assert bool((error <= allowed).all()), (error / allowed).max()


@pytest.mark.parametrize("columns", [16, 1152, 4304])
def test_rows_are_quantised_by_their_own_largest_value(columns: int, device: torch.device, dtype: torch.dtype) -> None:
    rows = torch.randn(7, 3 * columns, dtype=dtype, device=device)[:, :columns]
    rows[1] = 0
    rows[2] *= 1e20
    rows[3] *= 1e-20
    rows[4, 5] = 1000
    got = quantise(rows)
    close(got, rows, dtype)
    assert not got.values[1].float().any()


@pytest.mark.parametrize("lost", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_in_its_row(lost: float, device: torch.device, dtype: torch.dtype) -> None:
    rows = torch.randn(5, 64, dtype=dtype, device=device)
    layer = Float8Linear.of(nn.Linear(64, 32, dtype=dtype, device=device))
    before = layer(quantise(rows))
    rows[2, 7] = lost
    after = layer(quantise(rows))
    others = [0, 1, 3, 4]
    assert not after[2].isfinite().any()
    assert torch.equal(after[others], before[others])


@pytest.mark.parametrize("columns", [64, 1152, 1280])
@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
def test_a_norm_that_quantises(columns: int, kind: Any, device: torch.device, dtype: torch.dtype) -> None:
    norm = kind(columns, eps=1e-6, device=device, dtype=dtype)
    for weight in norm.parameters():
        nn.init.normal_(weight)
    hidden, more = torch.randn(2, 9, columns, dtype=dtype, device=device)
    ahead = torch.randn(columns, dtype=dtype, device=device)
    for added, extra in ((None, None), (more, None), (more, ahead)):
        summed, expected = add_norm(hidden, added, Norm.of(norm), extra)
        own, got = add_norm_quantise(hidden, added, Norm.of(norm), extra)
        assert torch.equal(own, summed)
        close(got, expected, dtype)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("columns", [2400, 4096])
def test_an_activation_that_quantises(
    columns: int, kind: str, gated: bool, device: torch.device, dtype: torch.dtype
) -> None:
    values = torch.randn(5, columns, dtype=dtype, device=device)
    got = activate_quantise(values, kind, gated=gated)
    close(got, activate(values.clone(), kind, gated=gated), dtype)


def tower_of(name: str, depth: int, dtype: torch.dtype, device: torch.device) -> tuple[PackedTower, Selection]:
    """A shallow tower with its modules exchanged, and attention for its fused blocks."""
    model_type, fields = PUBLISHED[name]
    small = {"num_heads": 2, "intermediate_size": 192} if device.type == "cpu" else {}
    tower = build(model_type, shrunk(fields, depth, 1152 if device.type == "cuda" else 144) | small, dtype, device)
    tower.rewrite()
    choice = select("auto" if device.type == "cuda" else "sdpa", device, dtype, *tower.attention_heads, captured=False)
    tower.use_attention(choice.implementation)
    if device.type == "cpu":
        choice = Selection.only(LoadedBackend("triton", segment_attention), "to be tested")
    return tower, choice


@pytest.mark.parametrize("name", list(PUBLISHED))
@torch.inference_mode()
def test_fused_blocks_in_float8_give_what_their_layers_give(
    name: str, device: torch.device, dtype: torch.dtype
) -> None:
    """After each block, as deepstack levels take rows between them; a second forward begins anew."""
    tower, choice = tower_of(name, DEPTH, dtype, device)
    blocks: list[Any] = list(tower.blocks)
    rows = torch.randn(40, blocks[0].attn.qkv.in_features, dtype=dtype, device=device)
    angles = torch.rand(40, tower.attention_heads[1] // 2, device=device).repeat(1, 2)

    def forward() -> list[Tensor]:
        """What each block adds to the rows."""
        ends = torch.tensor([0, 16, 40], dtype=torch.int32, device=device)
        states = [rows.clone()]
        for block in blocks:
            after = block(states[-1], cu_seqlens=ends, position_embeddings=(angles.cos(), angles.sin()), max_seqlen=24)
            states.append(after)
        return [state - rows for state in states[1:]]

    exact = forward()
    assert sum(reduce(block) for block in blocks) == DEPTH * (4 if "2.5" in name else 3)
    unfused = forward()
    assert fuse(blocks, choice) == DEPTH
    for _ in range(2):
        for got, layers, whole in zip(forward(), unfused, exact, strict=True):
            assert distance(got, layers) <= (ROUNDING / 2 if dtype is torch.float32 else 2 * ROUNDING)
            assert 2**-8 < distance(got, whole) <= 2 * ROUNDING, "it is in float8"


@torch.inference_mode()
@pytest.mark.parametrize(
    ("name", "reduced"),
    [
        ("Qwen3-VL-8B", "A M AM --"),
        ("Qwen3-VL-8B", "AM AM -- AM"),
        ("Qwen3-VL-8B", "-- M A M"),
        ("Qwen3-VL-8B", "M A M AM"),
        ("Qwen2.5-VL-7B", "AM M -- A"),
        ("Qwen2.5-VL-7B", "A -M AM M"),
    ],
)
def test_mixed_towers_give_what_their_layers_give(
    name: str, reduced: str, device: torch.device, dtype: torch.dtype
) -> None:
    """Halves of blocks in float8 after exact ones and before them.

    A: queries, keys and values, M: the MLP. Exact MLPs add to rows in place, those in float8 compute the next norm.
    """
    tower, choice = tower_of(name, 4, dtype, device)
    blocks: list[Any] = list(tower.blocks)
    rows = torch.randn(24, blocks[0].attn.qkv.in_features, dtype=dtype, device=device)
    angles = torch.rand(24, tower.attention_heads[1] // 2, device=device).repeat(1, 2)

    def forward() -> list[Tensor]:
        """What each block adds to the rows, copied at once, as deepstack levels are taken then."""
        ends = torch.tensor([0, 8, 24], dtype=torch.int32, device=device)
        states, added = rows.clone(), []
        for block in blocks:
            states = block(states, cu_seqlens=ends, position_embeddings=(angles.cos(), angles.sin()), max_seqlen=16)
            added.append(states - rows)
        return added

    marks = reduced.split()
    for block, own in zip(blocks, marks, strict=True):
        for each in replacements(block):
            each.use(reduced=("A" if each.of_attention else "M") in own)
    before, unfused = rows.clone(), forward()
    assert fuse(blocks, choice) == 4
    ahead = [getattr(block.forward.__self__.parts.end, "following", None) is not None for block in blocks]
    assert ahead == ["M" in one and "A" in other for one, other in pairwise([*marks, ""])], "only neighbours run ahead"
    first = forward()
    for got, expected in zip(first, unfused, strict=True):
        assert distance(got, expected) <= (ROUNDING / 2 if dtype is torch.float32 else 2 * ROUNDING)
    assert torch.equal(rows, before), "the tower's input is not written to"
    for got, expected in zip(forward(), first, strict=True):
        assert torch.equal(got, expected), "a second forward begins anew"


@torch.inference_mode()
def test_blocks_of_which_some_layers_are_in_float8_are_not_fused(device: torch.device, dtype: torch.dtype) -> None:
    model_type, fields = PUBLISHED["Qwen3-VL-8B"]
    tower = build(model_type, {**shrunk(fields, 1, 128), "intermediate_size": 144}, dtype, device)
    choice = select("sdpa", device, dtype, *tower.attention_heads, captured=False)
    found = [each for each in replacements(tower.blocks[0]) if not each.of_attention]
    assert len(found) == 2
    found[0].use(reduced=True)
    assert fuse(tower.blocks, choice) == 0
