"""The states of a server."""

import pytest

from vitwire_server.core.health import Health, State


def reached(*states: State) -> Health:
    health = Health()
    for state in states:
        health.change(state, "the reason")
    return health


@pytest.mark.parametrize(
    ("states", "ready", "alive"),
    [
        ([], False, True),
        ([State.WARMING], False, True),
        ([State.WARMING, State.SERVING], True, True),
        ([State.WARMING, State.SERVING, State.DRAINING], False, True),
        ([State.WARMING, State.SERVING, State.FAILED], False, False),
        ([State.WARMING, State.SERVING, State.FAILED, State.SERVING], True, True),
        ([State.WARMING, State.SERVING, State.DRAINING, State.FAILED], False, False),
    ],
)
def test_only_a_serving_server_is_ready_and_only_a_failed_one_is_dead(
    states: list[State], ready: bool, alive: bool
) -> None:
    health = reached(*states)
    assert (health.is_ready, health.is_alive) == (ready, alive)
    assert health.reason == ("" if alive else "the reason")


@pytest.mark.parametrize(
    "states",
    [
        [State.SERVING],
        [State.WARMING, State.STARTING],
        [State.WARMING, State.SERVING, State.WARMING],
        [State.WARMING, State.SERVING, State.DRAINING, State.SERVING],
        [State.FAILED, State.DRAINING],
    ],
)
def test_there_is_no_way_back_but_from_a_hang(states: list[State]) -> None:
    with pytest.raises(ValueError, match="the state cannot change"):
        reached(*states)


def test_to_become_what_one_is_changes_nothing() -> None:
    health = reached(State.FAILED)
    health.change(State.FAILED, "another reason")
    assert health.reason == "the reason"
