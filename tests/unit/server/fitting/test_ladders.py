"""Ladders by dynamic programming against every ladder there is, and traces that are read."""

import json
from itertools import combinations
from pathlib import Path

import pytest
from bench.ascending_packing import powers_of_two
from hypothesis import given
from hypothesis import strategies as st

from vitwire_server.core.capacities import PackedCapacities
from vitwire_server.core.costs import ASSUMED, Costs
from vitwire_server.core.grids import Footprint
from vitwire_server.fitting.ladders import expected_seconds, held_loads, optimal_ladder
from vitwire_server.fitting.traces import TraceError, queues, read_trace

NO_EAGER = Costs(replay_fixed=1.0, replay_token=0.01, eager_fixed=1e9, eager_token=1.0, eager_floor=1e9)


@given(
    st.dictionaries(st.integers(1, 60), st.floats(0.1, 5), min_size=1, max_size=7),
    st.integers(1, 4),
    st.sampled_from([NO_EAGER, ASSUMED, Costs(0.1, 0.02, 0.3, 0.02, 0.5)]),
)
def test_no_other_ladder_is_cheaper(weights: dict[int, float], count: int, costs: Costs) -> None:
    largest = 64
    ladder = optimal_ladder(weights, count, largest, costs)
    assert ladder == sorted(set(ladder))
    assert len(ladder) <= count
    assert ladder[-1] == largest
    cheapest = min(
        expected_seconds(weights, (*others, largest), costs)
        for size in range(count)
        for others in combinations(sorted(weights), size)
    )
    assert expected_seconds(weights, ladder, costs) == pytest.approx(cheapest)


def test_loads_are_sums_of_consecutive_items() -> None:
    weights = held_loads(
        [Footprint(4 * n, n, 1, 4 * n) for n in (10, 20, 70)], PackedCapacities(2), 95, {1: 1.0, 2: 1.0}
    )
    assert weights == {
        10: pytest.approx(0.01),
        20: pytest.approx(0.01),
        70: pytest.approx(0.01),
        30: pytest.approx(1 / 120),
        90: pytest.approx(1 / 120),
    }


def test_powers_of_two_end_at_the_largest() -> None:
    assert powers_of_two(4096) == [64, 128, 256, 512, 1024, 2048, 4096]
    assert powers_of_two(300) == [64, 128, 256, 300]
    assert powers_of_two(20) == [20]


class TestTraces:
    def test_items_become_footprints_in_order(self, tmp_path: Path) -> None:
        path = tmp_path / "trace.jsonl"
        lines = [
            {"t": 0.5, "items": [{"modality": "image", "grid": [1, 4, 6]}, {"modality": "video", "grid": [3, 2, 2]}]},
            {"t": 0.9, "items": []},
            {"t": 1.0, "items": [{"modality": "image", "grid": [1, 2, 2]}]},
        ]
        path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
        items = read_trace(path, merge=2)
        assert items == [Footprint(24, 6, 1, 24), Footprint(12, 3, 3, 4), Footprint(4, 1, 1, 4)]
        assert [len(queue) for queue in queues(items, 2)] == [2, 1]

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ("{}", "trace.jsonl:1: expected"),
            ('{"items": []}\nnonsense', "trace.jsonl:2: expected"),
            ('{"items": [{"grid": [1, 3, 2]}]}', "merge size 2"),
            ('{"items": [{"grid": [1, 2]}]}', "expected"),
            ('{"items": [{"grid": [0, 2, 2]}]}', "positive"),
            ("", "has no items"),
        ],
    )
    def test_a_wrong_line_is_named(self, content: str, message: str, tmp_path: Path) -> None:
        path = tmp_path / "trace.jsonl"
        path.write_text(content)
        with pytest.raises(TraceError, match=message):
            read_trace(path, merge=2)

    def test_a_missing_file_is_named(self) -> None:
        with pytest.raises(TraceError, match=r"/nowhere\.jsonl cannot be read"):
            read_trace(Path("/nowhere.jsonl"), merge=2)
