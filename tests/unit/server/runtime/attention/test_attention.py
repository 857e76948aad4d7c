"""Packed attention against dense attention under a block mask, in float64; and the choice among backends."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from vitwire_server.core.budgets import Ladder, budget
from vitwire_server.runtime import devices
from vitwire_server.runtime.attention import backends as known
from vitwire_server.runtime.attention import selection
from vitwire_server.runtime.attention.backends import BACKENDS, segment_sdpa
from vitwire_server.runtime.attention.selection import LoadedBackend, Selection, _fastest, select
from vitwire_server.runtime.devices import HOPPER, Architecture
from vitwire_server.runtime.kernels.operands import (
    AttentionTile,
    Division,
    Segments,
    Tiled,
    attention_division,
    attention_tile,
    hopper_groups,
)

HEADS, DIM = 2, 8


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(any), st.integers(0, 99))
def test_segments_attend_within_themselves_only(lengths: list[int], seed: int) -> None:
    rows = sum(lengths)
    generator = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, rows, HEADS, DIM, generator=generator, dtype=torch.float64)
    boundaries = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    strided = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v)]
    out = segment_sdpa(*strided, Segments(boundaries, max(lengths)), 0.3)
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    scores = torch.einsum("nhd,mhd->hnm", q, k) * 0.3
    scores = scores.masked_fill(owner[:, None] != owner[None, :], -torch.inf)
    expected = torch.einsum("hnm,mhd->nhd", scores.softmax(-1), v)
    torch.testing.assert_close(out, expected)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), min_size=1, max_size=12), st.integers(0, 99))
def test_queries_attend_to_the_keys_of_their_segment(counts: list[tuple[int, int]], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    queries, keys = zip(*counts, strict=True)
    q = torch.randn(sum(queries), HEADS, DIM, generator=generator, dtype=torch.float64)
    k, v = torch.randn(2, sum(keys), HEADS, DIM, generator=generator, dtype=torch.float64)
    ends, key_ends = (torch.tensor([0, *torch.tensor(each).cumsum(0)], dtype=torch.int32) for each in (queries, keys))
    out = segment_sdpa(q, k, v, Segments(ends, 9, key_ends, 9), 0.3)
    number = torch.arange(len(counts))
    owner, key_owner = (torch.repeat_interleave(number, torch.tensor(each)) for each in (queries, keys))
    scores = torch.einsum("nhd,mhd->hnm", q, k) * 0.3
    scores = scores.masked_fill(owner[:, None] != key_owner[None, :], -torch.inf)
    torch.testing.assert_close(out, torch.einsum("hnm,mhd->nhd", scores.softmax(-1), v))


def of_zeros(q: Tensor, *_: object) -> Tensor:
    return torch.zeros_like(q)


def refusing(*_: object) -> Tensor:
    raise AssertionError("only on a device of another kind")


@pytest.mark.parametrize(
    ("rows", "head_dim", "longest", "groups"),
    [
        (196, 72, 256, 1),
        (784, 72, 1024, 2),
        (784, 72, 784, 2),
        (3136, 72, 256, 2),
        (1600, 72, 1600, 2),
        (4096, 72, 4096, 3),
        (6272, 72, 1024, 3),
        (16384, 80, 16384, 3),
        (4096, 128, 4096, 2),
        (1, 64, 1, 1),
    ],
)
def test_the_kernel_for_hopper_takes_tiles_that_fill_the_device(
    rows: int, head_dim: int, longest: int, groups: int
) -> None:
    """With 16 heads on an H200, where heads of 72 columns were measured."""
    assert hopper_groups(rows, 16, head_dim, longest, HOPPER) == groups


@pytest.mark.parametrize("kept", [True, False])
def test_tiles_are_kept_if_a_backend_has_them(kept: bool) -> None:
    made: list[tuple[int, ...]] = []

    def tiles(_: Segments, *shape: int) -> Tensor:
        made.append(shape)
        return torch.tensor(len(made))

    def attend(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float, own: Tensor | None) -> Tensor:
        return segment_sdpa(q, k, v, segments, scale) * float(tiles(segments) if own is None else own)

    one = LoadedBackend("triton", Tiled(tiles, attend))
    q, k, v = torch.randn(3, 5, HEADS, DIM)
    segments = Segments(torch.tensor([0, 2, 5], dtype=torch.int32), 3)
    given = one.tiles(segments, q.shape) if kept else None
    rows = one.attended(q, k, v, segments, 0.3, tiles=given)
    torch.testing.assert_close(rows, segment_sdpa(q, k, v, segments, 0.3))
    torch.testing.assert_close(one.attend(q, k, v, segments, 0.3), 2 * rows)
    assert made == [(5, HEADS, DIM) if kept else (), ()]
    assert LoadedBackend("sdpa", segment_sdpa).tiles(segments, q.shape) is None


def test_each_band_has_its_own() -> None:
    short, long = LoadedBackend("triton", of_zeros), LoadedBackend("fa4", refusing)
    choice = Selection((short, short, long, long), "to be tested")
    assert (choice.name, choice.implementation) == ("triton+fa4", "vitwire_flash_triton+fa4")
    assert {longest: choice.at(longest).name for longest in (1, 256, 257, 1 << 40)} == {
        1: "triton",
        256: "triton",
        257: "fa4",
        1 << 40: "fa4",
    }
    assert (short.isolates, long.isolates) == (True, False)
    assert Selection.only(short, "").name == "triton"


def test_what_is_wrong_or_refuses_is_not_chosen(caplog: pytest.LogCaptureFixture) -> None:
    backends = [
        LoadedBackend("triton", of_zeros),
        LoadedBackend("varlen", refusing),
        LoadedBackend("sdpa", segment_sdpa),
    ]
    choice = _fastest(backends, torch.device("cpu"), torch.float32, 2, 8, {})
    assert choice.name == "sdpa"
    assert "64 patches: sdpa" in choice.reason
    assert "triton is not used: its relative error" in caplog.text
    assert "varlen is not used: it failed: only on a device of another kind" in caplog.text
    with pytest.raises(ValueError, match="no attention backend passed"):
        _fastest(backends[:2], torch.device("cpu"), torch.float32, 2, 8, {})


def test_a_backend_is_timed_in_the_graph_that_it_shares_with_longer_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles for longer segments may fit short ones badly."""
    microseconds = {"varlen": {64: 9, 196: 9, 1024: 9, 4096: 9}, "triton": {64: 6, 196: 6, 1024: 6, 4096: 8}}

    def seconds(run: Any, *_: object, **__: object) -> float:
        return microseconds[run.func.__self__.name][run.args[3].longest] * 1e-6

    monkeypatch.setattr(selection, "_seconds", seconds)

    def chosen() -> Selection:
        backends = [LoadedBackend(name, segment_sdpa) for name in microseconds]
        return _fastest(backends, torch.device("cpu"), torch.float32, 2, 8, {})

    assert [one.name for one in chosen().bands] == ["triton"] * 4
    microseconds["varlen"][196] = 7
    microseconds["triton"][1024] = 8
    choice = chosen()
    assert [one.name for one in choice.bands] == ["triton", "varlen", "triton", "triton"]
    assert "196 patches: varlen 7 us, triton 8 us; 1024 patches: triton 8 us" in choice.reason


def test_what_fails_in_a_graph_for_longer_segments_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    def alone(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> Tensor:
        if segments.longest != int(segments.boundaries.diff().max()):
            raise RuntimeError("tiles do not fit")
        return segment_sdpa(q, k, v, segments, scale)

    monkeypatch.setattr(selection, "_seconds", lambda run, *_, **__: run.func.__self__.name == "triton")
    faults: dict[str, str] = {}
    backends = [LoadedBackend("varlen", alone), LoadedBackend("triton", segment_sdpa)]
    assert _fastest(backends, torch.device("cpu"), torch.float32, 2, 8, faults).name == "triton"
    assert faults == {"varlen": "it failed: tiles do not fit"}


def test_a_name_that_cannot_serve_is_reported() -> None:
    for name, why in (("triton", "triton: it does not run on cpu"), ("fast", "there is no such backend")):
        with pytest.raises(
            ValueError, match=rf"{name}' does not run on cpu in torch.float32 \({why}\); available: sdpa"
        ):
            select(name, torch.device("cpu"), torch.float32, 2, 64, captured=False)


def test_the_heads_of_a_resampler_must_be_supported_too(monkeypatch: pytest.MonkeyPatch) -> None:
    own = replace(BACKENDS["sdpa"], head_dims=frozenset({64}))
    monkeypatch.setitem(BACKENDS, "sdpa", own)
    given = ("sdpa", torch.device("cpu"), torch.float32, 2, 64)
    assert select(*given, captured=False, resampler=(4, 64)).name == "sdpa"
    with pytest.raises(ValueError, match="sdpa: it does not support heads of 96 columns"):
        select(*given, captured=False, resampler=(4, 96))


def test_another_backend_for_shorter_segments_asks_for_a_budget_of_its_own() -> None:
    short, long, longest = (LoadedBackend(name, refusing) for name in ("triton", "fa4", "cudnn"))
    assert Selection((short, short, long, long), "").shorter(8192) == [256]
    assert [Selection((short, long, long, long), "").shorter(longest) for longest in (64, 128, 129)] == [[], [], [128]]
    assert Selection((short, short, long, long), "").shorter(256) == []
    assert Selection((short, long, long, longest), "").shorter(8192) == [128, 1024]
    assert Selection((short, long, long, longest), "").shorter(1024) == [128]
    assert Selection((short, long, short, short), "").shorter(8192) == [128, 256], "though it attends as the longest"
    assert Selection.only(long, "").shorter(8192) == []


def test_segments_beyond_8192_patches_have_graphs_unless_dense_attention_is_faster() -> None:
    short, long = (LoadedBackend(name, refusing) for name in ("triton", "fa4"))
    ladder = Ladder(tuple(budget(size, merge=2, max_items=64, max_frames=512) for size in (2048, 2560, 4096)))

    def lengths(selection: Selection) -> list[tuple[int, int]]:
        return [(each.tokens, each.max_segment_patches) for each in selection.completed(ladder, merge=2)]

    assert lengths(Selection.only(short, "")) == [(2048, 8192), (2560, 8192), (4096, 8192)]
    assert lengths(Selection.only(long, "")) == [
        (2048, 8192), (2560, 8192), (2560, 10240), (4096, 8192), (4096, 16384),
    ]  # fmt: skip
    both = lengths(Selection((short, short, long, long), ""))
    assert both[-3:] == [(4096, 256), (4096, 8192), (4096, 16384)]


DEVICES = {(7, 5): (40, 64), (8, 0): (108, 163), (8, 6): (84, 99), (8, 9): (128, 99), (9, 0): (132, 227)}
DEVICES |= {(10, 0): (148, 227), (12, 0): (170, 99)}
"""Multiprocessors of a device of each compute capability, and KiB of shared memory that a program may have."""


class TestDevices:
    """What a CUDA device of another generation runs, by its architecture alone."""

    @pytest.fixture(params=list(DEVICES), ids=str)
    def device(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Architecture:
        processors, shared = DEVICES[request.param]
        found = Architecture(request.param, processors, shared << 10)
        for module in (known, devices):
            monkeypatch.setattr(module, "architecture", lambda _: found)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a device")
        return found

    def test_backends_that_do_not_run_give_a_reason(self, device: Architecture) -> None:
        cuda = torch.device("cuda", 0)
        faults = {name: backend.fault(cuda, torch.float16, 72, captured=True) for name, backend in BACKENDS.items()}
        assert faults.pop("sdpa") == "CUDA graphs cannot capture it"
        assert not BACKENDS["sdpa"].fault(cuda, torch.float32, 72, captured=False)
        hopper = device.capability == (9, 0)
        other = "" if hopper else f"it has kernels for compute capability 9.x, the device has {device.name}"
        assert faults.pop("hopper") == "it does not compute float16"
        assert BACKENDS["hopper"].fault(cuda, torch.bfloat16, 72, captured=True) == other
        assert (
            BACKENDS["hopper"].fault(cuda, torch.bfloat16, 104, captured=True).startswith("it does not support heads")
        )
        turing = device.capability < (8, 0)
        assert set(faults.values()) == ({"it needs compute capability 8.0, the device has 7.5"} if turing else {""})
        assert bool(devices.kernel_fault(cuda)) is turing

    def test_what_is_unavailable_is_listed(self, device: Architecture, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(devices, "triton_fault", lambda: "")
        cuda, faults = torch.device("cuda", 0), {"fa4": "it cannot be loaded", "varlen": ""}
        turing = device.capability < (8, 0)
        listed = devices.unavailable(cuda, faults, graphs=not turing)
        kernels = "kernels and captured attention need compute capability 8.0, the device has 7.5"
        expected = {"graphs": kernels, "fused blocks": kernels} if turing else {}
        assert listed == expected | {"fa4": "it cannot be loaded"}
        assert devices.unavailable(torch.device("cpu"), faults, graphs=False) == {}

    def test_bfloat16_is_refused_where_it_is_not_computed(self, device: Architecture) -> None:
        fault = devices.dtype_fault(torch.bfloat16, torch.device("cuda", 0))
        assert not devices.dtype_fault(torch.float16, torch.device("cuda", 0))
        if device.capability >= (8, 0):
            assert not fault
        else:
            assert fault == (
                "cuda:0 (a device, compute capability 7.5) does not compute bfloat16, which needs 8.0 or newer; serve "
                "with --dtype float16 or --dtype float32"
            )

    @pytest.mark.parametrize("head_dim", sorted(BACKENDS["triton"].head_dims))
    def test_a_tile_fits_into_shared_memory(self, device: Architecture, head_dim: int) -> None:
        sizes = (64, 784, 1568, 4096, 65536)
        divisions = {attention_division(rows, 16, longest, device) for rows in sizes for longest in (64, 1024)}
        assert {division.rows for division in divisions} == {64, 128}
        for division in divisions:
            tile = attention_tile(division, head_dim, 2, device)
            assert tile.whole + tile.rest >= head_dim > tile.whole // 2
            assert not tile.rest or tile.whole + tile.spare >= head_dim
            if device.capability >= (8, 0):
                assert tile.shared_bytes(2, device) <= device.block_bytes
        if device.capability == (9, 0):
            for rows, longest, division, stages, warps in (
                (196, 196, Division(64, 132), 3, 4),
                (784, 784, Division(128, 132), 3, 8),
                (784, 64, Division(64), 2, 4),
                (1568, 196, Division(128, 264), 3, 4),
                (3136, 196, Division(128), 3, 4),
            ):
                assert attention_division(rows, 16, longest, device) == division, "as measured"
                expected = AttentionTile(division.rows, 64, 64, 16, 64, stages, warps)
                assert attention_tile(division, 72, 2, device) == expected
