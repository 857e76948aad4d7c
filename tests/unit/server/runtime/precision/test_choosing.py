"""The choice of blocks by what each loses, on losses that add up; and how sets of blocks are written."""

import math
from collections.abc import Collection

import pytest

from vitwire_server.config.settings import ServeSettings
from vitwire_server.runtime.precision.choosing import largest_set, ranges

LOSSES = [5.0, 1.0, 4.0, 2.0, 8.0, 3.0, 7.0, 6.0]


class Tower:
    """Each block loses so many thousandths; `measured` are the sets in their order."""

    def __init__(self, losses: list[float]) -> None:
        self.losses = losses
        self.measured: list[list[int]] = []

    def lowest(self, numbers: Collection[int]) -> float:
        self.measured.append(list(numbers))
        return 1 - sum(self.losses[number] for number in numbers) / 1000

    def chosen(self, goal: float) -> list[int]:
        return largest_set(range(len(self.losses)), self.lowest, goal)


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
    tower = Tower(LOSSES)
    assert tower.chosen(goal) == expected
    assert len(tower.measured) <= 1 + len(LOSSES) + math.ceil(math.log2(len(LOSSES) + 1)), "starts are bounded"
    if expected and len(expected) < len(LOSSES):
        assert sorted(expected) in map(sorted, tower.measured), "what is served was measured"


def test_a_tower_that_reaches_the_goal_is_measured_once() -> None:
    tower = Tower(LOSSES)
    tower.chosen(0.9)
    assert len(tower.measured) == 1


def test_equal_losses_are_taken_in_the_order_of_blocks() -> None:
    assert Tower([1.0] * 27).chosen(0.98995) == list(range(10))


def test_a_block_whose_rows_are_lost_is_taken_last() -> None:
    assert Tower([math.nan, 1.0, 1.0]).chosen(0.9) == [1, 2]


def test_sets_are_written_as_the_flag_takes_them() -> None:
    for numbers, text in (([3], "3"), ([7, 0, 1, 2], "0-2,7"), ([0, 2, 4, 5], "0,2,4-5"), (range(27), "0-26")):
        assert ranges(numbers) == text
        assert ServeSettings(model="m", precision="fp8", precision_blocks=text).precision_block_numbers == sorted(
            numbers
        )


@pytest.mark.parametrize("text", ["", "x", "1,", "-1", "1-", "3-1", "0-99999", "1 2"])
def test_what_is_no_set_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"precision.blocks"):
        ServeSettings(model="m", precision="fp8", precision_blocks=text)
