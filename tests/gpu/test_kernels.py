"""Triton kernels on the GPU, against the torch operations that they stand for, in float32 or rounded once.

`make kernel-test` runs the same tests on a CPU, in Triton's interpreter.
"""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

pytest.importorskip("triton")

from vitwire_server.runtime.attention.backends import BACKENDS, segment_sdpa
from vitwire_server.runtime.kernels.attention import segment_attention
from vitwire_server.runtime.kernels.norms import Norm, add_norm
from vitwire_server.runtime.kernels.operands import Segments
from vitwire_server.runtime.kernels.rotary import rotate
from vitwire_server.runtime.kernels.rowwise import KINDS, activate, contain, copy_checked, interpolated

LAYOUTS = ([196] * 4, [100, 64, 0, 4, 300, 1, 33], [17, 129, 0, 0, 0], [64] * 9 + [0] * 300, [512])
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def where(device: torch.device) -> None:
    if device.type != "cuda" and not interpreted():
        pytest.skip("a CPU runs Triton's kernels only in its interpreter: make kernel-test")


def interpreted() -> bool:
    import triton  # noqa: PLC0415 - there only where the tests run

    return bool(triton.knobs.runtime.interpret)


def distance(got: Tensor, expected: Tensor) -> float:
    return float((got.float() - expected.float()).norm() / expected.float().norm())


def limit(dtype: torch.dtype) -> float:
    """One rounding of each value, in norm: half a unit in the last place, or the order of float32 sums."""
    return max(1e-6, torch.finfo(dtype).eps / 2)


@pytest.fixture(params=[torch.float32, BF16], ids=str)
def dtype(request: pytest.FixtureRequest, device: torch.device) -> torch.dtype:
    if request.param is torch.float32 and device.type == "cuda":
        pytest.skip("served in half precision")
    if request.param is BF16 and device.type == "cpu":
        pytest.skip("the interpreter has no bfloat16 of its own")
    return request.param


def ends(lengths: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=device)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{len(layout)} slots")
@pytest.mark.parametrize("head_dim", sorted(BACKENDS["triton"].head_dims))
def test_attention_within_segments(head_dim: int, layout: list[int], device: torch.device, dtype: torch.dtype) -> None:
    heads = 2 if device.type == "cpu" else 16
    qkv = torch.randn(sum(layout), 3, heads, head_dim, dtype=dtype, device=device)
    segments, scale = Segments(ends(layout, device), max(layout)), head_dim**-0.5
    expected = segment_sdpa(*qkv.float().unbind(1), segments, scale)
    got = segment_attention(*qkv.unbind(1), segments, scale)
    assert distance(got, expected) <= max(4e-6, torch.finfo(dtype).eps)  # shares are rounded, then the rows


CROSSED = (
    ([64] * 3, [1024, 196, 40]),
    ([5, 0, 130, 64, 0], [100, 0, 7, 64, 0]),
    ([16] * 9 + [0] * 300, [*range(1, 10)] + [0] * 300),
)
"""Queries and keys of each segment."""


@pytest.mark.parametrize(("queries", "keys"), CROSSED, ids=lambda lengths: f"{sum(lengths)}")
@pytest.mark.parametrize("head_dim", sorted(BACKENDS["triton"].head_dims))
def test_queries_attend_to_the_keys_of_their_segment(
    head_dim: int, queries: list[int], keys: list[int], device: torch.device, dtype: torch.dtype
) -> None:
    heads, spare = 2 if device.type == "cpu" else 16, 3
    q = torch.randn(sum(queries) + spare, heads, head_dim, dtype=dtype, device=device)
    k, v = torch.randn(sum(keys), 2, heads, head_dim, dtype=dtype, device=device).unbind(1)
    segments, scale = Segments(ends(queries, device), max(queries), ends(keys, device), max(keys)), head_dim**-0.5
    expected = segment_sdpa(q.float(), k.float(), v.float(), segments, scale)[:-spare]
    got = segment_attention(q, k, v, segments, scale)[:-spare]
    assert distance(got, expected) <= max(4e-6, torch.finfo(dtype).eps)


def test_no_segment_sees_another(device: torch.device, dtype: torch.dtype) -> None:
    layout = [70, 64, 90]
    qkv = torch.randn(sum(layout), 3, 2, 72, dtype=dtype, device=device)
    segments = Segments(ends(layout, device), 90)
    before = segment_attention(*qkv.unbind(1), segments, 0.1)
    qkv[70:134] = torch.nan
    after = segment_attention(*qkv.unbind(1), segments, 0.1)
    assert after[70:134].isnan().all()
    assert torch.equal(after[:70], before[:70])
    assert torch.equal(after[134:], before[134:])


def rotated(qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The result of `rotate`, by torch operations."""
    turned = qkv[:, :2].float()
    one, two = turned.chunk(2, dim=-1)
    crossed = torch.cat((-two, one), dim=-1)
    turned = turned * cos[:, None, None] + crossed * sin[:, None, None]
    return torch.cat((turned.to(qkv.dtype), qkv[:, 2:]), dim=1)


@pytest.mark.parametrize("head_dim", [16, 18, 72, 80, 256])
def test_rotation_in_place(head_dim: int, device: torch.device, dtype: torch.dtype) -> None:
    qkv = torch.randn(37, 3, 5, head_dim, dtype=dtype, device=device)
    cos, sin = torch.randn(2, 37, head_dim, device=device)
    expected = rotated(qkv, cos, sin)
    rotate(qkv, cos, sin)
    assert distance(qkv, expected) <= limit(dtype)


@pytest.mark.parametrize("lost", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_contained(lost: float, device: torch.device, dtype: torch.dtype) -> None:
    """A key of NaN spoils what attends to it; a value of 0 spoils nothing that does not."""
    qkv = torch.randn(37, 3, 5, 72, dtype=dtype, device=device)
    cos, sin = torch.randn(2, 37, 72, device=device)
    whole = rotated(qkv, cos, sin)
    for row, head, column in ((3, 0, 1), (3, 4, 71), (36, 2, 40)):
        qkv[row, 2, head, column] = lost
    k, v = contain(qkv[:, 1], qkv[:, 2])
    spoiled = ~qkv[:, 2].isfinite().all(-1)
    assert torch.equal(k.isnan().all(-1), spoiled)
    assert torch.equal(k[~spoiled], qkv[:, 1][~spoiled])
    assert torch.equal(v, qkv[:, 2].where(qkv[:, 2].isfinite(), 0))
    rotate(qkv, cos, sin, contain=True)
    assert torch.equal(qkv[:, 2], v)
    assert torch.equal(qkv[:, 1].isnan().any(-1), spoiled)
    assert distance(qkv[:, 1][~spoiled], whole[:, 1][~spoiled]) <= limit(dtype)
    assert distance(qkv[:, 0], whole[:, 0]) <= limit(dtype)


@pytest.mark.parametrize("columns", [64, 1152, 1280])
@pytest.mark.parametrize("added", [False, True])
def test_norm_of_a_sum(columns: int, added: bool, device: torch.device, dtype: torch.dtype) -> None:
    norm = nn.LayerNorm(columns, eps=1e-6, device=device, dtype=dtype)
    rms = nn.RMSNorm(columns, eps=1e-6, device=device, dtype=dtype)
    for weight in (norm.weight, norm.bias, rms.weight):
        nn.init.normal_(weight)
    hidden, more = torch.randn(2, 9, columns, dtype=dtype, device=device)
    for each in (norm, rms):
        own = Norm.of(each)
        summed, normed = add_norm(hidden, more if added else None, own)
        expected = hidden + more if added else hidden
        assert torch.equal(summed, expected)
        if added:
            ahead, normed_too = add_norm(hidden, more, own, ahead=norm.bias)
            once = hidden.float() + more.float() + norm.bias.float()
            assert torch.equal(ahead, once.to(dtype)), "rounded once"
            assert torch.equal(normed_too, normed)
            scaled, _ = add_norm(hidden, more, own, factor=norm.bias)
            assert distance(scaled, hidden.float() + norm.bias.float() * more.float()) <= limit(dtype)
        assert distance(normed, each(expected.float()) if dtype is torch.float32 else each(expected)) <= 2 * limit(
            dtype
        )


@pytest.mark.parametrize("kind", list(KINDS))
def test_activations(kind: str, device: torch.device, dtype: torch.dtype) -> None:
    values = torch.randn(5, 2400, dtype=dtype, device=device)
    gate, up = values.chunk(2, dim=1)
    exact = ACT2FN[kind](values.float())
    gated = ACT2FN[kind](gate.float()) * up.float()
    assert distance(activate(values.clone(), kind, gated=True), gated) <= 2 * limit(dtype)
    assert distance(activate(values, kind), exact) <= limit(dtype)


@pytest.mark.parametrize("width", [7, 2048, 5000])
def test_copies_say_which_rows_are_finite(width: int, device: torch.device, dtype: torch.dtype) -> None:
    rows = torch.randn(9, width + 3, dtype=dtype, device=device)[:, :width]
    for row, column, lost in ((1, 0, torch.nan), (3, width - 1, torch.inf), (4, width // 2, -torch.inf)):
        rows[row, column] = lost
    rows[6, 0] = 1e6  # is infinity in float16
    for output in (dtype, torch.float32, torch.float16):
        out, finite = (
            torch.empty(9, width, dtype=output, device=device),
            torch.empty(9, dtype=torch.bool, device=device),
        )
        copy_checked(rows, out, finite)
        assert torch.equal(out.nan_to_num(), rows.to(output).nan_to_num())
        assert torch.equal(finite, rows.to(output).isfinite().all(1))


@pytest.mark.parametrize("columns", [64, 1152])
def test_interpolated_positions(columns: int, device: torch.device, dtype: torch.dtype) -> None:
    table, weights = torch.randn(50, columns, dtype=dtype, device=device), torch.rand(9, 4, device=device)
    indices = torch.randint(0, 50, (9, 4), device=device)
    exact = (table.float()[indices] * weights[:, :, None]).sum(1)
    assert distance(interpolated(table, indices, weights), exact) <= limit(dtype)
