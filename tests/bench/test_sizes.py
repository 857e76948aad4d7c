"""The shipped distribution has the shape that it says it has."""

import numpy as np
from bench.sizes import footprints, trace


def test_quartiles_icons_and_spike_are_those_of_the_production_service() -> None:
    tokens = np.array([footprint.tokens for footprint in footprints(20_000, 0)])
    assert 4 <= tokens.min() < tokens.max() <= 1280
    for quantile, expected in zip((25, 50, 75, 90), (209, 432, 999, 1222), strict=True):
        assert abs(np.percentile(tokens, quantile) / expected - 1) < 0.06
    assert 0.09 < np.mean(tokens < 10) < 0.15
    assert 0.18 < np.mean(tokens >= 1190) < 0.25


def test_same_seed_gives_the_same_trace() -> None:
    assert list(trace(50, 3)) == list(trace(50, 3))
    assert list(trace(50, 3)) != list(trace(50, 4))
    assert all(grid.h % 2 == grid.w % 2 == 0 for request in trace(200, 1) for grid in request)
