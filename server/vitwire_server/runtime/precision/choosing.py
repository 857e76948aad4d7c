"""The choice of what is computed in float8: as much as keeps embeddings similar enough.

A block has two halves, `attn`, the projections to queries, keys and values, and `mlp`: each is in float8 or exact.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import nn

from vitwire_server.runtime.precision.float8 import Replacement, replacements

HALVES = "attn", "mlp"


class Half(NamedTuple):
    """Half of a block."""

    block: int
    """Its number in the tower, from 0."""
    name: str
    """One of `HALVES`."""


class Reducible:
    """The halves of a tower's blocks that can be reduced to float8, each with its layers in both precisions."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self._layers: dict[Half, list[Replacement]] = {}
        for number, block in enumerate(blocks):
            for each in replacements(block):
                half = Half(number, HALVES[0] if each.of_attention else HALVES[1])
                self._layers.setdefault(half, []).append(each)
        self.sizes = {half: sum(each.exact.weight.numel() for each in own) for half, own in self._layers.items()}
        """The weights of each, to which its time is about proportional."""

    def share(self, halves: Collection[Half]) -> float:
        """The share of the weights that these halves have."""
        return sum(self.sizes[half] for half in halves) / sum(self.sizes.values())

    def stored(self, halves: Collection[Half]) -> int:
        """The number of linear layers of these halves that the checkpoint stores in float8."""
        return sum(each.is_stored for half in halves for each in self._layers[half])

    def reduce(self, halves: Collection[Half]) -> int:
        """Compute exactly these halves in float8; returns the number of their linear layers."""
        for half, layers in self._layers.items():
            for each in layers:
                each.use(reduced=half in halves)
        return sum(len(self._layers[half]) for half in halves)


def largest_set(sizes: Mapping[Half, int], lowest: Callable[[Collection[Half]], float], goal: float) -> list[Half]:
    """The most halves whose lowest similarity reaches `goal`, of those that lose least for their size; sorted.

    `lowest` measures a set: all, then if these do not reach the goal each alone, then by bisection some of those that
    lose least, at most `1 + n + ceil(log2(n))` times for `n` halves. Equal similarities give equal sets.
    """
    if lowest(list(sizes)) >= goal:
        return sorted(sizes)
    losses = {half: (1 - lowest([half])) / size for half, size in sizes.items()}
    order = sorted(sizes, key=lambda half: (math.isnan(losses[half]), losses[half], half))
    reaching, missing = 0, len(order)
    while missing - reaching > 1:
        middle = (reaching + missing) // 2
        if lowest(order[:middle]) >= goal:
            reaching = middle
        else:
            missing = middle
    return sorted(order[:reaching])


def named(halves: Collection[Half]) -> str:
    """Halves as `--precision-blocks` takes them: `0-3,attn:4-26`, whole blocks first."""
    of = [{half.block for half in halves if half.name == name} for name in HALVES]
    whole = of[0] & of[1]
    runs = [*_ranges(whole)]
    for name, blocks in zip(HALVES, of, strict=True):
        runs += [f"{name}:{run}" for run in _ranges(blocks - whole)]
    return ",".join(runs)


def _ranges(numbers: Collection[int]) -> Iterator[str]:
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    for run in runs:
        yield str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}"
