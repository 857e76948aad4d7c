"""Histograms of loads, and when another ladder is worth its capture."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from bench.sizes import footprints
from hypothesis import given, settings
from hypothesis import strategies as st

from vitwire_server.core.budgets import Ladder, default_tokens, with_longer, with_shorter
from vitwire_server.core.capacities import PackedCapacities, TileCapacities
from vitwire_server.core.costs import ASSUMED, Costs
from vitwire_server.core.grids import Footprint
from vitwire_server.fitting.ladders import (
    LEAST_GAIN,
    capture_seconds,
    expected_seconds,
    interpolated,
    padding,
    propose,
)
from vitwire_server.fitting.learned import HALF_LIFE, Demands, LoadHistogram, rounded_up

MOST = 4096
DEFAULT = default_tokens(MOST)
DEMANDS = Demands(PackedCapacities(2), MOST, max_items=64, max_frames=512)


def image(tokens: int) -> Footprint:
    return Footprint(4 * tokens, tokens, 1, 4 * tokens)


class TestHistogram:
    def test_old_loads_fade(self) -> None:
        histogram = LoadHistogram()
        histogram.add(100)
        for _ in range(HALF_LIFE):
            histogram.add(200)
        assert histogram.loads[100] == pytest.approx(0.5)
        assert histogram.loads[200] == pytest.approx(sum(2 ** (-n / HALF_LIFE) for n in range(HALF_LIFE)))

    def test_it_is_bounded_and_keeps_the_heaviest(self) -> None:
        histogram = LoadHistogram({7: 1e3})
        for n in range(5000):
            histogram.add(1 + n)
        assert len(histogram.loads) <= 1024
        assert histogram.loads[7] > 100
        assert 5000 in histogram.loads

    def test_weights_stay_finite(self) -> None:
        histogram = LoadHistogram()
        for _ in range(60 * HALF_LIFE):
            histogram.add(5)
        assert histogram.loads[5] == pytest.approx(HALF_LIFE / 0.693147, rel=1e-3)

    @pytest.mark.parametrize(
        ("window", "taken", "tokens"),
        [
            ([100], 1, 100),
            ([100, 60], 2, 160),
            ([100, 60], 1, 160),
            ([100] * 8, 8, 800),
            ([100] * 8, 7, None),
            ([2048, 2047], 2, MOST),
            ([2048, 2049], 2, None),
            ([MOST], 1, None),  # its segment is too long for graphs
            ([999], 1, 1000),
        ],
    )
    def test_a_demand_is_what_waited_together(self, window: list[int], taken: int, tokens: int | None) -> None:
        """Unless the planner had a choice among many items, or no budget holds it."""
        assert DEMANDS.of([image(size) for size in window], taken) == tokens

    def test_many_small_items_need_slots_as_well(self) -> None:
        needed = DEMANDS.of([image(4)] * 30, 30)
        assert needed
        assert DEMANDS.budget(needed).fits(Footprint(480, 120, 30, 16), 30)
        assert needed < 700

    def test_budgets_of_as_many_tokens_hold_longer_segments_or_more(self) -> None:
        """As on a GPU. Many segments have room only if all are short."""

        def completed(ladder: Ladder) -> Ladder:
            return with_shorter(with_longer(ladder, merge=2), lambda longest: [256] if longest > 256 else [], merge=2)

        demands = replace(DEMANDS, completed=completed)
        assert demands.of([image(MOST)], 1) == MOST
        clip = Footprint(40 * 64, 40 * 16, 40, 64)
        assert demands.of([clip], 1) == DEMANDS.of([clip], 1) == 640
        assert demands.of([clip, image(300)], 2) is None
        assert DEMANDS.of([clip, image(300)], 2) == demands.of([image(640), image(300)], 2) == 944

    def test_tiles_are_demanded_whole(self) -> None:
        tiles = Demands(TileCapacities(256, 1024), 256 * 20, max_items=8, max_frames=512)
        for count in range(1, 21):
            assert tiles.of([Footprint(count, 256 * count, count, 1024)], 1) == 256 * count

    @given(st.integers(1, 1 << 20))
    def test_rounding_adds_little(self, tokens: int) -> None:
        assert tokens <= rounded_up(tokens) <= tokens * 65 / 64
        assert rounded_up(rounded_up(tokens)) == rounded_up(tokens)


class TestProposals:
    def test_a_better_ladder_has_to_save_what_its_capture_takes(self) -> None:
        loads = {330: 1.0}
        saved = ASSUMED.replay(408) - ASSUMED.replay(330)
        worth = capture_seconds([330], ASSUMED) / saved
        assert propose(loads, DEFAULT, DEFAULT, ASSUMED, int(worth * 0.9)) is None
        found = propose(loads, DEFAULT, DEFAULT, ASSUMED, int(worth * 1.2))
        assert found
        assert {330, MOST} <= set(found.sizes)
        assert not found.is_default
        assert found.padding_before == pytest.approx(1 - 330 / 408)
        assert found.padding == 0
        assert found.gain == pytest.approx(saved / ASSUMED.replay(408))

    def test_a_small_gain_is_none(self) -> None:
        loads = {400: 1.0}
        assert (408 - 400) * ASSUMED.replay_token / ASSUMED.replay(408) < LEAST_GAIN
        assert propose(loads, DEFAULT, DEFAULT, ASSUMED, 10**9) is None
        assert propose({}, DEFAULT, DEFAULT, ASSUMED, 10**9) is None

    @settings(max_examples=60)
    @given(
        st.dictionaries(st.integers(1, MOST), st.floats(0.01, 100), min_size=1, max_size=40),
        st.sets(st.integers(1, MOST), max_size=12),
        st.sampled_from([ASSUMED, Costs(0.1, 0.02, 0.3, 0.02, 0.5)]),
    )
    def test_it_is_never_slower_than_the_default_or_the_current_ladder(
        self, loads: dict[int, float], learned: set[int], costs: Costs
    ) -> None:
        current = sorted({*learned, MOST})
        found = propose(loads, current, DEFAULT, costs, 10**9)
        own = expected_seconds(loads, found.sizes if found else current, costs)
        default = expected_seconds(loads, DEFAULT, costs)
        assert own <= default * (1 + LEAST_GAIN + 1e-9)
        if found:
            assert own <= min(default, expected_seconds(loads, current, costs)) + 1e-12
            assert len(found.sizes) <= len(DEFAULT)
            assert found.sizes[-1] == MOST

    def test_the_default_comes_back_when_it_is_best(self) -> None:
        loads = dict.fromkeys(DEFAULT, 1.0)
        found = propose(loads, [100, MOST], DEFAULT, ASSUMED, 10**9)
        assert found
        assert (found.is_default, list(found.sizes)) == (True, DEFAULT)

    def test_production_sizes_pad_below_four_per_cent_after_one_change_and_then_stay(self) -> None:
        """Judged on items that it was not fitted to."""
        histogram, current, changes, served = LoadHistogram(), DEFAULT, 0, 0
        for footprint in footprints(5000, seed=1):
            if (tokens := DEMANDS.of([footprint], 1)) is None:
                continue
            histogram.add(tokens)
            served += 1
            if served % 512 == 0 and (found := propose(histogram.loads, current, DEFAULT, ASSUMED, served)):
                current, changes, served = list(found.sizes), changes + 1, 0
        others = dict(Counter(footprint.tokens for footprint in footprints(2000, seed=2)))
        assert changes == 1
        assert padding(others, DEFAULT, ASSUMED) > 0.04 > padding(others, current, ASSUMED)
        assert expected_seconds(others, current, ASSUMED) < expected_seconds(others, DEFAULT, ASSUMED)


def test_costs_between_measured_budgets_lie_on_a_line_and_rise() -> None:
    measured = {16: 1.0, 64: 2.0, 128: 1.9, 256: 4.0}
    costs = interpolated(Costs(9.0, 9.0, 9.0, 9.0, 9.0, measured=measured), range(1, 257))
    assert costs.replay(1) == costs.replay(16) == 1.0
    assert costs.replay(64) == costs.replay(128) == 1.9
    assert costs.replay(192) == pytest.approx(2.95)
    assert all(costs.replay(a) <= costs.replay(b) for a, b in pairwise(range(1, 257)))
    assert interpolated(ASSUMED, [5]) is ASSUMED
