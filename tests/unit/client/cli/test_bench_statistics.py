"""The benchmark's pure parts: arrivals, mixes, percentiles, the search for capacity."""

import math
from itertools import islice, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitwire_cli.bench import capacity, options
from vitwire_cli.bench.capacity import Search
from vitwire_cli.bench.load import NOT_SENT, Sample
from vitwire_cli.bench.results import Run
from vitwire_cli.bench.workload import ImageSize, draws

rates = st.floats(0.01, 1e5)


@settings(max_examples=20)
@given(rates, st.integers(0, 99))
def test_poisson_arrivals_keep_the_rate_and_ascend(rate: float, seed: int) -> None:
    times = list(islice(options.poisson(rate, seed), 4000))
    assert times == sorted(times)
    assert 4000 / times[-1] == pytest.approx(rate, rel=0.12), "7 standard deviations"
    gaps = [(after - before) * rate for before, after in pairwise(times)]
    assert sum(gap < math.log(2) for gap in gaps) / len(gaps) == pytest.approx(0.5, abs=0.06), "exponential gaps"


@given(rates)
def test_uniform_arrivals_have_equal_gaps(rate: float) -> None:
    assert list(islice(options.uniform(rate), 5)) == pytest.approx([number / rate for number in range(5)])


@settings(max_examples=20)
@given(st.lists(st.integers(1, 99), min_size=1, max_size=5), st.integers(1, 4))
def test_mixes_are_drawn_by_weight(weights: list[int], items: int) -> None:
    sizes = [ImageSize(8, 8, weight) for weight in weights]
    drawn = [index for row in draws(sizes, items, 3000) for index in row]
    total = sum(weights)
    for index, weight in enumerate(weights):
        share = weight / total
        spread = math.sqrt(share * (1 - share) / len(drawn))
        assert drawn.count(index) / len(drawn) == pytest.approx(share, abs=6 * spread + 1e-9)


@given(st.integers(1, 99999), st.integers(1, 99999), st.none() | st.integers(1, 999))
def test_sizes_are_written_as_they_are_read(width: int, height: int, weight: int | None) -> None:
    text = f"{width}x{height}" + ("" if weight is None else f":{weight}")
    assert str(ImageSize.parse(text)) == text


@given(
    st.lists(st.tuples(st.floats(0, 100), st.floats(0, 10), st.booleans()), min_size=1, max_size=60), st.floats(1, 9e3)
)
def test_requests_that_fail_miss_every_limit(outcomes: list[tuple[float, float, bool]], limit: float) -> None:
    samples = [Sample(due, due + took, error=NOT_SENT if lost else "") for due, took, lost in outcomes]
    found = Run(100.0, samples)
    assert found.missed(limit) == sum(s.error != "" or s.latency * 1e3 > limit for s in samples)
    assert found.missed(math.inf) == len(samples) - len(found.answered)
    latency = found.document()["latency_ms"]
    assert isinstance(latency, dict)
    assert list(latency.values())[1:] == sorted(list(latency.values())[1:])


@given(st.floats(0.05, 1e4), st.floats(0.01, 100))
def test_the_search_finds_a_threshold(holding: float, start: float) -> None:
    search = Search(holding * start)
    while not search.done:
        search.record(search.rate <= holding)
    assert search.capacity is not None
    assert holding / capacity.TOLERANCE * (1 - 1e-9) <= search.capacity <= holding
    assert search.trials < capacity.MAX_TRIALS


@given(st.floats(0.05, 1e4), st.lists(st.booleans(), min_size=capacity.MAX_TRIALS, max_size=capacity.MAX_TRIALS))
def test_a_search_ends_whatever_trials_say_and_reports_only_what_held_to_the_end(
    start: float, results: list[bool]
) -> None:
    search, history = Search(start), []
    for result in results:
        if search.done:
            break
        history.append((search.rate, result))
        search.record(result)
    assert search.done
    if search.capacity is not None:
        assert history[-capacity.CONFIRMATIONS :] == [(search.capacity, True)] * capacity.CONFIRMATIONS
        assert all(held for rate, held in history if rate <= search.capacity)


def test_a_service_that_holds_nothing_has_no_capacity() -> None:
    search = Search(100.0)
    while not search.done:
        search.record(holds=False)
    assert search.capacity is None


@given(st.floats(0.1, 1e5), st.floats(0.1, 1e3), st.floats(0, 0.95))
def test_replicas_carry_the_demand_within_the_headroom(demand: float, each: float, headroom: float) -> None:
    count = capacity.replicas(demand, each, headroom)
    usable = each * (1 - headroom)
    assert count * usable >= demand * (1 - 1e-6)
    assert count == 1 or (count - 1) * usable < demand
