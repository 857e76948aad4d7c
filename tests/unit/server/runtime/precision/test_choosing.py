"""The choice of halves of blocks by what each loses, on losses that add up; and how sets of them are written."""

import math
from collections.abc import Collection, Mapping

import pytest

from vitwire_server.config.settings import ServeSettings
from vitwire_server.runtime.precision.choosing import Half, largest_set, named

LOSSES = [5.0, 1.0, 4.0, 2.0, 8.0, 3.0, 7.0, 6.0]


def attn(*blocks: int) -> list[Half]:
    return [Half(block, "attn") for block in blocks]


def mlp(*blocks: int) -> list[Half]:
    return [Half(block, "mlp") for block in blocks]


class Tower:
    """Each half loses so many thousandths; `measured` are the sets in their order."""

    def __init__(self, losses: Mapping[Half, float], sizes: Mapping[Half, int] | None = None) -> None:
        self.losses = losses
        self.sizes = sizes or dict.fromkeys(losses, 1)
        self.measured: list[list[Half]] = []

    def lowest(self, halves: Collection[Half]) -> float:
        self.measured.append(sorted(halves))
        return 1 - sum(self.losses[half] for half in halves) / 1000

    def chosen(self, goal: float) -> list[Half]:
        return largest_set(self.sizes, self.lowest, goal)


@pytest.mark.parametrize(
    ("goal", "expected"),
    [
        (0.9, [0, 1, 2, 3, 4, 5, 6, 7]),
        (0.97195, [0, 1, 2, 3, 5, 6, 7]),
        (0.98995, [1, 2, 3, 5]),
        (0.9985, [1]),
        (0.9999, []),
    ],
)
def test_those_that_lose_least_as_long_as_the_goal_is_reached(goal: float, expected: list[int]) -> None:
    tower = Tower(dict(zip(mlp(*range(8)), LOSSES, strict=True)))
    assert tower.chosen(goal) == mlp(*expected)
    assert len(tower.measured) <= 1 + len(LOSSES) + math.ceil(math.log2(len(LOSSES))), "starts are bounded"
    if expected and len(expected) < len(LOSSES):
        assert mlp(*expected) in tower.measured, "what is served was measured"


def test_a_tower_that_reaches_the_goal_is_measured_once() -> None:
    tower = Tower(dict(zip(mlp(*range(8)), LOSSES, strict=True)))
    tower.chosen(0.9)
    assert len(tower.measured) == 1


def test_large_halves_may_lose_more() -> None:
    """Losses count for each weight, as weights are about the time that is saved."""
    losses = {**dict.fromkeys(attn(0, 1, 2), 2.0), **dict.fromkeys(mlp(0, 1, 2), 3.0)}
    sizes = {**dict.fromkeys(attn(0, 1, 2), 1), **dict.fromkeys(mlp(0, 1, 2), 3)}
    assert Tower(losses, sizes).chosen(0.9905) == mlp(0, 1, 2)


def test_equal_losses_are_taken_in_the_order_of_blocks() -> None:
    assert Tower(dict.fromkeys(mlp(*range(27)), 1.0)).chosen(0.98995) == mlp(*range(10))


def test_a_half_whose_rows_are_lost_is_taken_last() -> None:
    assert Tower(dict(zip(mlp(0, 1, 2), [math.nan, 1.0, 1.0], strict=True))).chosen(0.9) == mlp(1, 2)


@pytest.mark.parametrize(
    ("halves", "text"),
    [
        (mlp(3), "mlp:3"),
        ([*mlp(3), *attn(3)], "3"),
        ([*mlp(0, 1, 2, 7), *attn(7, 0, 1, 2)], "0-2,7"),
        ([*attn(*range(27)), *mlp(20, 22, 23)], "20,22-23,attn:0-19,attn:21,attn:24-26"),
        ([*attn(1), *mlp(2)], "attn:1,mlp:2"),
    ],
)
def test_sets_are_written_as_the_flag_takes_them(halves: list[Half], text: str) -> None:
    assert named(halves) == text
    parts = ServeSettings(model="m", precision="fp8", precision_blocks=text).precision_parts
    assert parts is not None
    read = {Half(block, name) for block, half in parts for name in ([half] if half else ["attn", "mlp"])}
    assert read == set(halves)


@pytest.mark.parametrize("text", ["", "x", "1,", "-1", "1-", "3-1", "0-99999", "1 2", "attn:", "qkv:1", "attn:3-1"])
def test_what_is_no_set_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"precision.blocks"):
        ServeSettings(model="m", precision="fp8", precision_blocks=text)
