"""Jobs to parts: each frame of a picture or clip, with the addresses that its program works on."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from vitwire_server.preparing.device.passes import program
from vitwire_server.preparing.device.tables import Field, Memory, Program, Table
from vitwire_server.preparing.rules.patches import CHANNELS
from vitwire_server.preparing.rules.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Job:
    """A picture, and the rows that it is prepared into; all contiguous on one device."""

    picture: Tensor
    """`(H, W, 3)`, or frames `(F, H, W, 3)`; uint8."""
    recipe: Recipe
    pixels: Tensor
    """`(rows, elements)`: patches `(C, T, p, p)` or `(T, p, p, C)`, or tiles `(C, H, W)`; an image is written to all
    frames of its patches, however many they have."""
    crops: Tensor | None = None
    """`(crops, elements)`, if there are any."""


class Part(NamedTuple):
    """A frame, and where its rows are."""

    program: Program
    addresses: dict[Memory, int]
    """But for scratch."""
    itemsize: int
    """Of an element of a row."""
    copies: int
    """Frames of a patch that it is written to."""
    affine: int
    """The first of its pairs of scales and offsets."""

    def placed(self, scratch: int, taps: Sequence[tuple[int, int, int]]) -> tuple[list[Table], Table]:
        """The levels of the program and its last passes, with addresses.

        `scratch` is the address of its scratch; `taps` are the addresses of starts and weights of each of its taps, and
        their number.
        """
        addresses = self.addresses | {Memory.SCRATCH: scratch}
        sums = np.array(taps, np.int64).reshape(-1, 3)
        *levels, last = (table.copy() for table in (*self.program.levels, self.program.last))
        for table, sources in zip((*levels, last), self.program.sources, strict=True):
            table[:, Field.SOURCE] += [addresses[memory] for memory in sources]
            summed = table[:, Field.STARTS] >= 0
            table[summed, Field.STARTS : Field.TAPS + 1] = sums[table[summed, Field.STARTS]]
        for table in levels:
            table[:, Field.TARGET] += scratch
        last[:, Field.TARGET] *= self.itemsize
        last[:, Field.TARGET] += [addresses[memory] for memory in self.program.targets]
        last[:, Field.AFFINE] += self.affine
        last[:, Field.COPIES] = self.copies
        return levels, last


def parts(job: Job, affine: int) -> Iterator[Part]:
    """The frames of a job, in order; the last fills its patches. Raises ValueError as `passes.program`."""
    *frames, height, width, channels = job.picture.shape
    assert channels == CHANNELS
    count = frames[0] if frames else 1
    depth = 1 if job.recipe.settings.tiling else job.pixels.shape[1] // (CHANNELS * job.recipe.patch**2)
    made = program((height, width), job.recipe, frames[0] if frames else None, depth)
    groups, itemsize = -(-count // depth), job.pixels.element_size()
    assert job.pixels.shape == (groups * made.rows[0], made.columns[0]), "rows are those that the recipe makes"
    crops = 0 if job.crops is None else job.crops.data_ptr()
    assert bool(crops) == bool(made.rows[1]), "crops, if there are any"
    to_group, to_crops = (rows * columns * itemsize for rows, columns in zip(made.rows, made.columns, strict=True))
    to_frame = int(made.last[0, Field.TARGET_COPY]) * itemsize
    for index in range(count):
        group, slot = divmod(index, depth)
        addresses = {
            Memory.FRAME: job.picture.data_ptr() + index * height * width * CHANNELS,
            Memory.PIXELS: job.pixels.data_ptr() + group * to_group + slot * to_frame,
            Memory.CROPS: crops + group * to_crops,
        }
        yield Part(made, addresses, itemsize, depth - slot if index == count - 1 else 1, affine)
