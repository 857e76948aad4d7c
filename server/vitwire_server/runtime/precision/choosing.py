"""The choice of the blocks that are computed in float8: as many as keep embeddings similar enough."""

import math
from collections.abc import Callable, Collection, Sequence

from torch import nn

from vitwire_server.runtime.precision.float8 import replacements


class Reducible:
    """The blocks of a tower that can be reduced to float8, each with its layers in both precisions."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        found = enumerate(map(replacements, blocks))
        self._layers = {number: layers for number, layers in found if layers}

    @property
    def numbers(self) -> list[int]:
        """The numbers of these blocks in the tower, from 0, ascending."""
        return list(self._layers)

    def stored(self, numbers: Collection[int]) -> int:
        """The number of linear layers of these blocks that the checkpoint stores in float8."""
        return sum(each.is_stored for number in numbers for each in self._layers[number])

    def reduce(self, numbers: Collection[int]) -> int:
        """Compute exactly these blocks in float8; returns the number of their linear layers."""
        for number, layers in self._layers.items():
            for each in layers:
                each.use(reduced=number in numbers)
        return sum(len(self._layers[number]) for number in numbers)


def largest_set(numbers: Sequence[int], lowest: Callable[[Collection[int]], float], goal: float) -> list[int]:
    """The most blocks whose lowest similarity reaches `goal`, of those that lose least alone; ascending.

    `lowest` measures a set of blocks: all, then if these do not reach the goal each alone, then by bisection some of
    those that lose least, `1 + n + log2(n)` times for `n` blocks. Equal similarities give equal sets.
    """
    if lowest(numbers) >= goal:
        return sorted(numbers)
    alone = {number: lowest([number]) for number in numbers}
    order = sorted(numbers, key=lambda number: (math.isnan(alone[number]), -alone[number], number))
    reaching, missing = 0, len(order)
    while missing - reaching > 1:
        middle = (reaching + missing) // 2
        if lowest(order[:middle]) >= goal:
            reaching = middle
        else:
            missing = middle
    return sorted(order[:reaching])


def ranges(numbers: Collection[int]) -> str:
    """Numbers as `--precision-blocks` takes them, such as `0-3,7`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
