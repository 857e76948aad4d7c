"""Pictures prepared on their device: programs of several pictures together, one launch for each level of passes."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vitwire_server.preparing.device.passes import program
from vitwire_server.preparing.device.tables import Field, Memory, Program, Table, Taps
from vitwire_server.preparing.rules.filters import taps
from vitwire_server.preparing.rules.patches import CHANNELS
from vitwire_server.preparing.rules.recipe import Recipe, affine

_KEPT = 256
"""Tables of taps that stay on the device."""
_SCRATCH_BYTES = 256 << 20
"""Scratch of the frames that are prepared together, unless one takes more."""
_CLIP = 4
"""Axes of a clip."""


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


class _Part(NamedTuple):
    """A frame, and the addresses of its rows."""

    program: Program
    addresses: dict[Memory, int]
    """But for scratch."""
    itemsize: int
    """Bytes of an element of a row."""
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


def _parts(job: Job, affine: int) -> Iterator[_Part]:
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
        yield _Part(made, addresses, itemsize, depth - slot if index == count - 1 else 1, affine)


def prepare(jobs: Sequence[Job]) -> None:
    """Prepare pictures into their rows, all of one dtype: floats are normalised, uint8 is not.

    Runs on the current stream, always the same one, and never waits for it. On a CPU, torch follows the tables in
    place of the kernel. Raises ValueError as `pillow.prepared`, before any launch.
    """
    if not jobs:
        return
    device, dtype = jobs[0].pixels.device, jobs[0].pixels.dtype
    for job in jobs:
        rows = [each for each in (job.pixels, job.crops) if each is not None]
        assert all(each.device == device and each.is_contiguous() for each in (job.picture, *rows))
        assert job.picture.dtype is torch.uint8
        assert all(each.dtype is dtype for each in rows)
    recipes = {recipe: place for place, recipe in enumerate({job.recipe: None for job in jobs})}
    settings = [each for recipe in recipes for each in (recipe.settings, recipe.settings.of_crops)]
    scales = _affine(tuple(map(affine, settings)), device)
    for group in _groups([part for job in jobs for part in _parts(job, 2 * recipes[job.recipe])]):
        _run(group, device, dtype, scales)


def prepared(picture: Tensor, recipe: Recipe, dtype: torch.dtype = torch.uint8) -> tuple[Tensor, Tensor | None]:
    """New rows of the pixels and crops of a picture or clip; in uint8 those that `pillow.prepared` gives.

    In uint8 a patch of an image has one frame. Raises ValueError as `pillow.prepared`.
    """
    is_clip = picture.ndim == _CLIP
    count = picture.shape[0] if is_clip else 1
    depth = recipe.temporal if is_clip or dtype is not torch.uint8 else 1
    made = program((picture.shape[-3], picture.shape[-2]), recipe, count if is_clip else None, depth)
    groups = -(-count // made.depth)
    pixels, crops = (
        torch.empty(groups * rows, columns, dtype=dtype, device=picture.device)
        for rows, columns in zip(made.rows, made.columns, strict=True)
    )
    job = Job(picture, recipe, pixels, crops if len(crops) else None)
    prepare([job])
    return pixels, job.crops


def _groups(frames: Sequence[_Part]) -> Iterator[list[_Part]]:
    """Frames whose scratch fits together."""
    group: list[_Part] = []
    used = 0
    for part in frames:
        if group and used + part.program.scratch > _SCRATCH_BYTES:
            yield group
            group, used = [], 0
        group.append(part)
        used += part.program.scratch
    yield group


def follower(device: torch.device) -> Callable[[Tensor, tuple[int, int], torch.dtype, Tensor], None]:
    """The function that runs tables on this device; see `kernels.follow`."""
    if device.type == "cpu":
        from vitwire_server.preparing.device.host import follow  # noqa: PLC0415 - one or the other
    else:
        from vitwire_server.preparing.device.kernels import follow  # noqa: PLC0415 - needs Triton
    return follow


def _run(frames: Sequence[_Part], device: torch.device, dtype: torch.dtype, scales: Tensor) -> None:
    ends = np.cumsum([part.program.scratch for part in frames]).tolist()
    scratch = torch.empty(ends[-1], dtype=torch.uint8, device=device)
    held = {axis: _on_device(axis, device) for part in frames for axis in part.program.taps}  # until all is launched
    addresses = {
        axis: (starts.data_ptr(), weights.data_ptr(), len(weights)) for axis, (starts, weights) in held.items()
    }
    placed = [
        part.placed(scratch.data_ptr() + end - part.program.scratch, [addresses[axis] for axis in part.program.taps])
        for part, end in zip(frames, ends, strict=True)
    ]
    levels = [
        np.concatenate([tables[level] for tables, _ in placed if level < len(tables)])
        for level in range(max(len(tables) for tables, _ in placed))
    ]
    tables = [*levels, np.concatenate([last for _, last in placed])]
    on_device = _moved(np.concatenate(tables), device).split([len(table) for table in tables])
    follow = follower(device)
    for table, there in zip(tables, on_device, strict=True):
        largest = int(table[:, Field.DOWN].max()), int(table[:, Field.ACROSS].max())
        follow(there, largest, dtype if table is tables[-1] else torch.uint8, scales)


@lru_cache(_KEPT)
def _on_device(axis: Taps, device: torch.device) -> tuple[Tensor, Tensor]:
    """The first pixel of each sum `(length,)`, and weights `(taps, length)`; int32."""
    starts, weights = taps(*axis)
    return _moved(starts, device), _moved(np.ascontiguousarray(weights.T), device)


def _moved(array: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """The array on the device, without waiting for work there."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


@lru_cache
def _affine(pairs: tuple[tuple[tuple[float, ...], tuple[float, ...]], ...], device: torch.device) -> Tensor:
    """Scales and offsets of pixels and of crops, in turn: `(pairs, 2, 3)` float32."""
    return _moved(np.array(pairs, np.float32), device)
