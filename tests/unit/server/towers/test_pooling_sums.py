"""Sums over packed segments, against those of each segment alone."""

from itertools import pairwise

import pytest
import torch

from vitwire_server.towers.shared.pooling import numbers, summed

LENGTHS = [[5], [0, 16, 17, 0, 1, 256, 257, 0], [4097, 0, 3], [1] * 40, [16] * 9]


def boundaries(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


@pytest.mark.parametrize("lengths", LENGTHS)
def test_sums_are_those_of_each_segment(lengths: list[int]) -> None:
    rows = torch.randn(sum(lengths), 2, 3, generator=torch.Generator().manual_seed(0))
    ends = boundaries(lengths)
    alone = torch.stack([rows[left:right].double().sum(0) for left, right in pairwise(ends.tolist())])
    for longest in (max(lengths), 8 * max(lengths)):
        assert (summed(rows, ends, longest) - alone).abs().max() <= 1e-6 * max(lengths) ** 0.5 * 4
    assert numbers(ends, len(rows)).tolist() == [at for at, length in enumerate(lengths) for _ in range(length)]


@pytest.mark.parametrize("harm", [torch.nan, torch.inf])
def test_nan_and_infinity_stay_in_their_segment(harm: float) -> None:
    lengths = [20, 17, 40]
    rows, ends = torch.ones(sum(lengths), 2), boundaries(lengths)
    rows[20:37] = harm
    sums = summed(rows, ends, 40)
    assert sums[[0, 2]].tolist() == [[20.0, 20.0], [40.0, 40.0]]
    assert not sums[1].isfinite().any()


def test_no_shape_depends_on_values() -> None:
    sums = summed(torch.randn(300, 2, device="meta"), torch.zeros(6, dtype=torch.int32, device="meta"), 300)
    assert sums.shape == (5, 2)
