"""How a request is split: by tokens, with equal content ids together, and only where that pays."""

import time
from contextlib import ExitStack
from dataclasses import replace
from itertools import groupby
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2
from hypothesis import given, settings
from hypothesis import strategies as st

from both_clients import Call, both, large
from fake_service import SERVICE, Fake, Running, abort, item, model_message, serving
from nameserver import answering
from vitwire import Client, Item, Unavailable
from vitwire._transport.balancing import MAX_ROUTED, REPLICA_HEADER, Balancing, Replicas, balanced, hint_of, tokens_of
from vitwire.model import Model, TileShapes

MODEL = Model.from_message(model_message())
HINT = "x-vitwire-content-id"


def tiled(crop: tuple[int, int] | None = None) -> Model:
    """A model that takes tiles of 16 tokens."""
    return replace(MODEL, tiles=TileShapes((32, 32), crop, patch=0, single=False, layouts=()))


def tiles(count: int, grid: tuple[int, int, int], **kwargs: Any) -> Item:
    return Item(np.zeros((count, 3, 32, 32), np.uint8), grid, **kwargs)


def lookup(content_id: str, grid: tuple[int, int, int] = (1, 2, 2)) -> Item:
    return Item(None, grid, content_id=content_id)


@pytest.mark.parametrize(
    ("model", "item", "tokens"),
    [
        (MODEL, item(7), 7),
        (MODEL, Item(np.zeros((24, 6), np.uint8), (2, 6, 2), "video", keep_ratio=0.25), 6),
        (MODEL, lookup("a", (4, 2, 2)), 4),
        (MODEL, Item(encoded=bytes(4_000)), 4_000 // 32 // 4),
        (MODEL, Item(encoded=bytes(200_000)), 64),
        (MODEL, Item(np.zeros((28, 56, 3), np.uint8)), 2),
        (MODEL, Item(np.zeros((280, 560, 3), np.uint8)), 64),
        (MODEL, Item(content_id="a"), 1),
        (tiled(), tiles(5, (5, 2, 2)), 80),
        (tiled(), tiles(5, (5, 1, 1)), 80),
        (tiled(), lookup("a", (5, 2, 2)), 80),
        (tiled(crop=(16, 16)), Item(content_id="a"), 16),
        (tiled(crop=(16, 16)), tiles(1, (5, 2, 2), crops=np.zeros((4, 3, 16, 16), np.uint8)), 16 + 4 * 4),
        (tiled(crop=(16, 16)), tiles(2, (2, 1, 1), crops=np.zeros((2, 3, 16, 16), np.uint8)), 2 * (16 + 4)),
        (tiled(crop=(16, 16)), lookup("a", (5, 2, 2)), 16 + 4 * 4),
    ],
)
def test_tokens_of_items(model: Model, item: Item, tokens: int) -> None:
    assert tokens_of(item, model) == tokens


@given(st.lists(st.integers(1, 1000), max_size=40), st.integers(1, 8))
def test_no_part_has_more_than_its_fair_share_and_one_group(costs: list[int], count: int) -> None:
    """The bound of greedy scheduling: the mean, and at most one group more."""
    by_index = dict(enumerate(costs))
    parts = balanced([[index] for index in by_index], by_index, count)
    assert sorted(index for part in parts for index in part) == list(by_index)
    assert len(parts) == min(count, len(costs))
    assert all(parts)
    loads = [sum(by_index[index] for index in part) for part in parts]
    assert max(loads, default=0) <= sum(costs) / count + max(costs, default=0)


ITEMS = st.lists(
    st.tuples(st.integers(1, 64), st.sampled_from([None, "", "a", "b", "c", "d"]), st.booleans()),
    min_size=1,
    max_size=12,
).map(lambda rows: dict(enumerate(_item(*row) for row in rows)))


def _item(tokens: int, content_id: str | None, pixels: bool) -> Item:
    if content_id and not pixels:
        return lookup(content_id, (1, 2 * tokens, 2))
    return item(tokens, content_id=content_id)


@settings(max_examples=200)
@given(ITEMS, st.integers(1, 6), st.booleans())
def test_shares_are_a_partition_that_keeps_content_together(
    items: dict[int, Item], spread: int, affinity: bool
) -> None:
    shares = Balancing(spread, affinity).shares(items, MODEL, 1)
    assert sorted(index for share in shares for index in share.indices) == list(items)
    holders: dict[str, set[int]] = {}
    for number, share in enumerate(shares):
        assert share.indices
        assert list(share.indices) == sorted(share.indices)
        named = [content_id for index in share.indices if (content_id := items[index].content_id)]
        assert share.hint == (hint_of(named[0]) if named else None)
        assert share.is_routed == (affinity and bool(named))
        for content_id in named:
            holders.setdefault(content_id, set()).add(number)
    assert all(len(each) == 1 for each in holders.values())
    if affinity:
        assert all(len({items[index].content_id or None for index in share.indices}) == 1 for share in shares)
    else:
        assert len(shares) <= spread


@given(ITEMS, ITEMS)
def test_with_affinity_a_hint_does_not_depend_on_other_items(one: dict[int, Item], other: dict[int, Item]) -> None:
    def hints(items: dict[int, Item]) -> dict[str, str | None]:
        shares = Balancing(1, affinity=True).shares(items, MODEL, 1)
        return {items[index].content_id or "": share.hint for share in shares for index in share.indices}

    first, second = hints(one), hints(other)
    assert all(first[name] == second[name] for name in first.keys() & second.keys())


def test_a_request_of_many_content_ids_is_no_flood_of_calls() -> None:
    items = {index: item(1, content_id=str(index)) for index in range(100)}
    assert len(Balancing(1, affinity=True).shares(items, MODEL, 1)) == MAX_ROUTED


@pytest.mark.parametrize(
    ("tokens", "replicas", "parts"), [(64, 4, 1), (65, 4, 2), (500, 4, 4), (500, 1, 1), (500, 0, 1)]
)
def test_auto_splits_what_exceeds_a_budget_between_known_replicas(tokens: int, replicas: int, parts: int) -> None:
    items = {index: item(1) for index in range(tokens)}
    assert MODEL.budgets[-1].tokens == 64
    assert len(Balancing("auto").shares(items, MODEL, replicas)) == parts


def test_auto_without_budgets() -> None:
    model, items = replace(MODEL, budgets=()), {index: lookup("x" * index, (1, 128, 128)) for index in range(1, 3)}
    assert len(Balancing("auto").shares(items, model, 2)) == 2
    assert len(Balancing("auto").shares({1: items[1]}, model, 2)) == 1


def test_replicas_count_for_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now, replicas = 100.0, Replicas()
    monkeypatch.setattr("vitwire._transport.balancing.time.monotonic", lambda: now)
    assert replicas.count() == 0
    replicas.saw([("x-request-id", "a"), (REPLICA_HEADER, "one")])
    replicas.saw(None)
    replicas.saw([(REPLICA_HEADER, b"bytes")])
    now = 150.0
    replicas.saw([(REPLICA_HEADER, "two")])
    replicas.saw([(REPLICA_HEADER, "two")])
    assert replicas.count() == 2
    now = 165.0
    assert replicas.count() == 1


@pytest.mark.parametrize("content_id", ["a", "é\n", "\ud800", "x" * 10_000])
def test_hints_are_short_and_valid_headers(content_id: str) -> None:
    assert hint_of(content_id) == hint_of(content_id)
    assert len(hint_of(content_id)) == 32
    assert set(hint_of(content_id)) <= set("0123456789abcdef")


@both
async def test_calls_send_a_hint_of_the_first_content_id(client: Any, running: Running) -> None:
    await client.encode([item(1), item(1, content_id="second"), item(1, content_id="third")])
    assert running.fake.metadata[HINT] == hint_of("second")
    await client.encode([replace(large(), content_id="large")])
    assert (running.fake.methods[-1], running.fake.metadata[HINT]) == ("EncodeStream", hint_of("large"))
    await client.encode([item(1)])
    assert HINT not in running.fake.metadata
    await client.with_options(metadata={HINT: "chat-7"}).encode([item(1, content_id="second")])
    assert running.fake.metadata[HINT] == "chat-7"


@both
async def test_a_repeated_attempt_sends_no_hint(client: Any, running: Running) -> None:
    """The replica that a hint leads to is full or gone."""
    hints: list[str | None] = []

    def full_at_first(context: Any) -> None:
        sent = dict(context.invocation_metadata())
        hints.append(sent.get(HINT))
        if len(hints) == 1:
            abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc_retry_pushback_ms="10")

    await client.model()
    running.fake.before = full_at_first
    await client.encode([item(1, content_id="a")])
    assert hints == [hint_of("a"), None]


@both
async def test_with_affinity_each_content_id_is_a_call(make: Call, running: Running) -> None:
    names = ["a", "b", "a", None]
    async with make(running.target, timeout=20, affinity=True) as client:
        rows = await client.encode([item(1, value, content_id=name) for value, name in enumerate(names)])
    assert [float(each.numpy()[0, 0]) for each in rows] == [0.0, 1.0, 2.0, 3.0]
    assert [(name, len(list(calls))) for name, calls in groupby(running.fake.methods)] == [
        ("GetModel", 1),
        ("Encode", 3),
    ]


@pytest.mark.parametrize("form", ["ipv4", "dns"])
def test_calls_alternate_between_healthy_addresses(form: str) -> None:
    """By default, for every target with several addresses."""
    with serving(Fake()) as one, ExitStack() as stack:
        port = int(one.target.rpartition(":")[2])
        other = stack.enter_context(serving(Fake(), port, host="127.0.0.2"))
        names = stack.enter_context(answering("127.0.0.1", "127.0.0.2"))
        target = names.target(port) if form == "dns" else f"ipv4:127.0.0.1:{port},127.0.0.2:{port}"
        client, deadline = stack.enter_context(Client(target, timeout=20)), time.monotonic() + 20
        while not {"Encode"} <= set(one.fake.methods) & set(other.fake.methods):
            assert time.monotonic() < deadline
            client.encode([item(1)])
        before = len(one.fake.methods), len(other.fake.methods)
        for _ in range(10):
            client.encode([item(1)])
        assert min(len(one.fake.methods) - before[0], len(other.fake.methods) - before[1]) >= 4
        one.health.set(SERVICE, health_pb2.HealthCheckResponse.NOT_SERVING)
        alone, deadline = 0, time.monotonic() + 20
        while alone < 5:
            assert time.monotonic() < deadline
            calls = len(one.fake.methods)
            client.encode([item(1)])
            alone = alone + 1 if len(one.fake.methods) == calls else 0


@both
@pytest.mark.parametrize("form", ["{}", "dns:///{}", "dns:{}", "ipv4:{}"])
async def test_a_server_that_is_not_ready_gets_no_calls_whatever_the_target(
    make: Call, form: str, running: Running
) -> None:
    running.health.set(SERVICE, health_pb2.HealthCheckResponse.NOT_SERVING)
    async with make(form.format(running.target), max_retries=0) as client:
        for call in (client.model(), client.encode([item(1)])):
            with pytest.raises(Unavailable):
                await call
    assert "Encode" not in running.fake.methods
