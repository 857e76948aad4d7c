"""Packed attention against dense attention under a block mask, in float64; and the choice among backends."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vitwire_server.runtime.attention.backends.sdpa import segment_sdpa
from vitwire_server.runtime.attention.selection import LoadedBackend, Selection, _fastest, select

HEADS, DIM = 2, 8


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(any), st.integers(0, 99))
@settings(deadline=None)
def test_segments_attend_within_themselves_only(lengths: list[int], seed: int) -> None:
    rows = sum(lengths)
    generator = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, rows, HEADS, DIM, generator=generator, dtype=torch.float64)
    boundaries = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    strided = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v)]
    out = segment_sdpa(*strided, boundaries, max(lengths), 0.3)
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    scores = torch.einsum("nhd,mhd->hnm", q, k) * 0.3
    scores = scores.masked_fill(owner[:, None] != owner[None, :], -torch.inf)
    expected = torch.einsum("hnm,mhd->nhd", scores.softmax(-1), v)
    torch.testing.assert_close(out, expected)


def of_zeros(q: Tensor, *_: object) -> Tensor:
    return torch.zeros_like(q)


def refusing(*_: object) -> Tensor:
    raise AssertionError("only on a device of another kind")


def test_each_band_has_its_own() -> None:
    short, long = LoadedBackend("triton", of_zeros), LoadedBackend("fa4", refusing)
    choice = Selection((short, short, long), "to be tested")
    assert (choice.name, choice.implementation) == ("triton+fa4", "vitwire_flash_triton+fa4")
    assert {longest: choice.at(longest).name for longest in (1, 1024, 1025, 1 << 40)} == {
        1: "triton",
        1024: "triton",
        1025: "fa4",
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
    choice = _fastest(backends, torch.device("cpu"), torch.float32, 2, 8)
    assert choice.name == "sdpa"
    assert "64 patches: sdpa" in choice.reason
    assert "triton is not used: relative error" in caplog.text
    assert "varlen failed: only on a device of another kind" in caplog.text
    with pytest.raises(ValueError, match="no attention backend passed"):
        _fastest(backends[:2], torch.device("cpu"), torch.float32, 2, 8)


def test_a_name_that_cannot_serve_is_reported() -> None:
    with pytest.raises(
        ValueError, match=r"'triton' does not run on cpu in torch.float32; available: sdpa \(cpu/cuda\)"
    ):
        select("triton", torch.device("cpu"), torch.float32, 2, 64, captured=False)
