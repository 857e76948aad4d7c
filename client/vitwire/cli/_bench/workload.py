"""What the benchmark sends: items of random pixels, and which of them each request holds."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice

import numpy as np

from vitwire import Item, Model
from vitwire.cli._bench.pictures import Form, Grid, GridOf, item_of, random_item
from vitwire.cli._bench.traces import Trace

_MIX_REQUESTS = 1024
"""Requests drawn from a weighted mix before they repeat."""
_MAX_WARMUP = 32


@dataclass(frozen=True, slots=True)
class ImageSize:
    """A size of `--size`."""

    width: int
    height: int
    weight: float | None = None

    @classmethod
    def parse(cls, text: str) -> "ImageSize":
        """Raises ValueError unless the text is WIDTHxHEIGHT or WIDTHxHEIGHT:WEIGHT."""
        found = re.fullmatch(r"([1-9]\d{0,4})x([1-9]\d{0,4})(?::(\d{1,6}(?:\.\d{1,6})?))?", text)
        if found is None or (found[3] is not None and not float(found[3])):
            raise ValueError(f"{text!r} is not WIDTHxHEIGHT or WIDTHxHEIGHT:WEIGHT")
        return cls(int(found[1]), int(found[2]), None if found[3] is None else float(found[3]))

    def __str__(self) -> str:
        """As it is parsed."""
        return f"{self.width}x{self.height}" + ("" if self.weight is None else f":{self.weight:g}")


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests, to be sent in turn and again from the first. Items that are equal are shared."""

    requests: Sequence[Sequence[Item]]
    sizes: Mapping[ImageSize, Item] = field(default_factory=dict)
    """The item of each size of `--size`."""

    @property
    def warmup(self) -> Sequence[Sequence[Item]]:
        """Requests that show the server each kind of item once, up to a limit."""
        if len(self.requests) <= _MAX_WARMUP:
            return self.requests
        distinct = {id(item): item for items in self.requests for item in items}
        return [[item] for item in islice(distinct.values(), _MAX_WARMUP)]

    def __getitem__(self, number: int) -> Sequence[Item]:
        """The items of request `number`."""
        return self.requests[number % len(self.requests)]


@dataclass(frozen=True, slots=True)
class Shape:
    """What the model makes of a size."""

    size: str
    resized_to: str | None
    """The size at which it is encoded, if that differs by a token or more."""
    grid: tuple[int, int, int]
    tokens: int

    @classmethod
    def of(cls, size: ImageSize, grid: Grid, tokens: int, model: Model) -> "Shape":
        unit, slack = _unit(grid, model)
        height, width = (count * side for count, side in zip(grid[1:], unit, strict=True))
        same = abs(height - size.height) < slack and abs(width - size.width) < slack
        return cls(str(size), None if same else f"{width}x{height}", grid, tokens)


def _unit(grid: Grid, model: Model) -> tuple[tuple[int, int], int]:
    """Height and width that one of a grid's rows and columns stands for, and how far sizes are from whole ones."""
    tiles = model.tiles
    if tiles is None:
        return (model.patch_size, model.patch_size), model.patch_size * model.merge_size
    if tiles.patch:
        return (tiles.patch, tiles.patch), tiles.patch
    return (tiles.crop if tiles.crop and not tiles.single and grid[0] > 1 else tiles.tile), 1


def of_sizes(
    sizes: Sequence[ImageSize], items: int, frames: int, form: Form, model: Model, grid_of: GridOf
) -> Workload:
    """Requests of `items` images, or clips of `frames` frames.

    Sizes take turns; if any has a weight, each item's size is drawn by weight instead (1 for those without).
    """
    made = [random_item(size.height, size.width, frames, form, model, grid_of) for size in sizes]
    named = dict(zip(sizes, made, strict=True))
    if all(size.weight is None for size in sizes):
        turns, distinct = cycle(made), len(sizes) // math.gcd(len(sizes), items)
        return Workload([list(islice(turns, items)) for _ in range(distinct)], named)
    return Workload([[made[index] for index in row] for row in draws(sizes, items, _MIX_REQUESTS)], named)


def draws(sizes: Sequence[ImageSize], items: int, requests: int) -> list[list[int]]:
    """Indices of sizes drawn by weight, for each item of each request; the same each time."""
    weights = np.array([1.0 if size.weight is None else size.weight for size in sizes])
    drawn: list[list[int]] = (
        np.random.default_rng(0).choice(len(sizes), (requests, items), p=weights / weights.sum()).tolist()
    )
    return drawn


def of_trace(trace: Trace, model: Model) -> Workload:
    """The requests of a trace, as pixels of the shapes that a processor returns."""
    items = {size: item_of(size.grid, size.modality, model) for sizes in trace.requests for size in sizes}
    return Workload([[items[size] for size in sizes] for sizes in trace.requests])
