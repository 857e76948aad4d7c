"""Deficit round robin: its order, its bounds, and what single images wait for beside a request of 200."""

import random
from collections.abc import Iterator, Sequence
from statistics import quantiles

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitwire.shared.fairness.shares import Shares
from vitwire_server.core.budgets import Ladder, budget, default_tokens
from vitwire_server.core.costs import Costs
from vitwire_server.core.grids import Footprint, Grid
from vitwire_server.core.items import DType, Item, Modality, Pixels
from vitwire_server.core.plans import Fallback
from vitwire_server.scheduling.planner import Bounds, Planner
from vitwire_server.scheduling.queue import Queue
from vitwire_server.scheduling.tickets import Entry, Ticket

QUANTUM = 10
Work = list[tuple[int, int]]
WORK = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 45)), max_size=60)
"""Elements as (flow, cost), in the order they come."""


def filled(work: Work) -> Shares[int]:
    shares: Shares[int] = Shares(QUANTUM)
    for element, (flow, cost) in enumerate(work):
        shares.push((0, flow), element, cost)
    return shares


@given(WORK, st.integers(0, 70))
def test_looking_changes_nothing_and_a_short_look_is_the_start_of_a_long_one(work: Work, limit: int) -> None:
    shares = filled(work)
    everything = shares.order(len(work))
    assert sorted(everything) == list(range(len(work)))
    assert shares.order(limit) == everything[:limit]


@given(WORK, st.lists(st.integers(0, 59), max_size=30))
def test_a_flow_is_first_in_first_out_whatever_was_taken_from_it(work: Work, picks: list[int]) -> None:
    shares = filled(work)
    gone = {pick for pick in picks if pick < len(work)}
    shares.take(((0, work[element][0]), element) for element in sorted(gone))
    rest = shares.order(len(work))
    assert sorted(rest) == sorted(set(range(len(work))) - gone)
    for flow in range(6):
        assert (own := [e for e in rest if work[e][0] == flow]) == sorted(own)


@given(st.lists(st.lists(st.integers(1, 45), min_size=20, max_size=20), min_size=2, max_size=4))
def test_flows_that_always_wait_get_the_same_within_a_turn_and_an_element(flows: list[list[int]]) -> None:
    """The bound of deficit round robin: a quantum and the largest element on either side."""
    work = [(flow, cost) for flow, costs in enumerate(flows) for cost in costs]
    shares = filled(work)
    served = dict.fromkeys(range(len(flows)), 0)
    left = dict.fromkeys(range(len(flows)), 20)
    while min(left.values()) > 0:
        (element,) = shares.order(1)
        flow, cost = work[element]
        shares.take([((0, flow), element)])
        served[flow] += cost
        left[flow] -= 1
        assert max(served.values()) - min(served.values()) <= QUANTUM + 2 * 45


@given(st.integers(1, 400), st.integers(1, 45), st.integers(1, 6))
def test_a_flow_is_served_however_many_new_ones_keep_coming(owed: int, cost: int, newcomers: int) -> None:
    """Debts are paid a quantum a round, so a round of newcomers at a time it moves up."""
    shares: Shares[str] = Shares(QUANTUM)
    shares.push((0, "old"), "first", owed)
    shares.push((0, "old"), "second", cost)
    shares.take([((0, "old"), "first")])
    turns = 0
    while (head := shares.order(1)) != ["second"]:
        if head:
            shares.take([((0, head[0]), head[0])])
        for _ in range(newcomers):
            turns += 1
            shares.push((0, f"new {turns}"), f"new {turns}", QUANTUM)
        assert turns <= newcomers * ((owed + cost) // QUANTUM + 2) * (newcomers + 1)


def test_who_was_served_ahead_of_its_share_lets_others_pass() -> None:
    shares: Shares[int] = Shares(QUANTUM)
    for element in range(8):
        shares.push((0, "large"), element, 10)
    shares.take([((0, "large"), element) for element in range(4)])
    shares.push((0, "single"), 100, 10)
    shares.push((0, "double"), 200, 10)
    shares.push((0, "double"), 201, 10)
    assert shares.order(5) == [100, 200, 201, 4, 5]


def test_nobody_pays_for_a_device_that_nobody_else_wanted() -> None:
    """After any number of batches a flow owes at most one of them."""
    shares: Shares[int] = Shares(QUANTUM)
    for element in range(200):
        shares.push((0, "large"), element, 10)
        shares.push((0, "single"), 1000 + element, 1)
        shares.take([((0, "large"), element), ((0, "single"), 1000 + element)])
        shares.push((0, "large"), 5000 + element, 10)
    for element in range(9000, 9010):
        shares.push((0, "busy"), element, 10)
    assert min(shares.order(4)) < 9000, "the debt is one batch of 11, so two turns pay it"


@given(WORK, st.integers(0, 5))
def test_dropped_elements_cost_nothing(work: Work, flow: int) -> None:
    shares, kept = filled(work), filled([one for one in work if one[0] != flow])
    for element, (owner, _) in enumerate(work):
        if owner == flow:
            shares.drop((0, flow), element)
    survivors = [e for e, (owner, _) in enumerate(work) if owner != flow]
    assert [survivors.index(e) for e in shares.order(99)] == kept.order(99)
    assert shares.ahead(0, 30) == kept.ahead(0, 30)


# -- with the planner ------------------------------------------------------------------------------

SIZES = (64, 144, 256, 576, 1024)
MOST = 4096
TOKEN_SECONDS = 9.6e-6
COSTS = Costs(2e-3, TOKEN_SECONDS, 3.9e-3, TOKEN_SECONDS, 4.5e-3)


def entry(ticket: Ticket, index: int, tokens: int, arrived: float) -> Entry:
    footprint = Footprint(4 * tokens, tokens, 1, 4 * tokens)
    pixels = Pixels(b"a", DType.UINT8, (1, 1))
    return Entry(ticket, index, Item(Modality.IMAGE, Grid(1, 2, 2 * tokens), pixels, footprint, DType.FLOAT32), arrived)


def singles(load: float, count: int) -> Iterator[tuple[float, int]]:
    """Poisson arrivals that keep the device busy for this share of the time, the same ones each time."""
    rng, now = random.Random(7), 0.0
    for _ in range(count):
        now += rng.expovariate(load / (TOKEN_SECONDS * sum(SIZES) / len(SIZES)))
        yield now, rng.choice(SIZES)


def served(arrivals: Sequence[tuple[float, int]], large: int) -> tuple[list[float], float]:
    """Seconds that each single waits for its batch while `large` images of one request wait too; the longest batch."""
    ladder = Ladder(tuple(budget(size, merge=2, max_items=64, max_frames=512) for size in default_tokens(MOST)))
    planner = Planner(ladder, Bounds(MOST, 64, 512), without_graph=Fallback.GRAPHS_OFF, costs=COSTS)
    queue, request, rng = Queue(), Ticket(lambda *_: None), random.Random(8)
    for index in range(large):
        queue.push(entry(request, index, rng.choice(SIZES), 0.0))
    coming, waits, now, longest = list(reversed(arrivals)), [], 0.0, 0.0
    while coming or len(queue):
        now = now if len(queue) else max(now, coming[-1][0])
        while coming and coming[-1][0] <= now:
            arrived, tokens = coming.pop()
            queue.push(entry(Ticket(lambda *_: None), 0, tokens, arrived))
        window = queue.window(64, planner.capacity)
        footprints = [one.item.footprint for one in window]
        batch = planner.plan(footprints).batches[0]
        taken = [window[item] for item in batch.items]
        queue.take(taken)
        waits += [now - one.arrived for one in taken if one.ticket is not request]
        seconds = planner.work(batch, footprints).alone
        now, longest = now + seconds, max(longest, seconds)
    return waits, longest


@pytest.mark.parametrize("load", [0.1, 0.3, 0.5])
def test_200_images_do_not_raise_the_p99_of_singles_beyond_one_batch(load: float) -> None:
    arrivals = list(singles(load, 400))
    alone, _ = served(arrivals, large=0)
    beside, longest = served(arrivals, large=200)
    assert quantiles(beside, n=100)[98] <= quantiles(alone, n=100)[98] + longest
    endless, longest = served(arrivals, large=3000)
    assert quantiles(endless, n=100)[98] <= quantiles(alone, n=100)[98] + longest
