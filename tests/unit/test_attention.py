"""Packed attention against dense attention under a block mask, in float64."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vitwire_server.runtime.backends import segment_sdpa

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
