"""Pictures prepared on their device: programs of several pictures together, one launch for each level of passes."""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vitwire_server.core.models import Preprocessing
from vitwire_server.preparing.device.parts import Job, Part, parts
from vitwire_server.preparing.device.passes import program
from vitwire_server.preparing.device.tables import Field, Table, Taps
from vitwire_server.preparing.rules.filters import taps
from vitwire_server.preparing.rules.recipe import Recipe, affine

_KEPT = 256
"""Tables of taps that stay on the device."""
_SCRATCH_BYTES = 256 << 20
"""Scratch of the frames that are prepared together, unless one takes more."""
_CLIP = 4
"""Axes of a clip."""


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
    scales = _affine(tuple(recipe.settings for recipe in recipes), device)
    for group in _groups([part for job in jobs for part in parts(job, 2 * recipes[job.recipe])]):
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


def _groups(frames: Sequence[Part]) -> Iterator[list[Part]]:
    """Frames whose scratch fits together."""
    group: list[Part] = []
    used = 0
    for part in frames:
        if group and used + part.program.scratch > _SCRATCH_BYTES:
            yield group
            group, used = [], 0
        group.append(part)
        used += part.program.scratch
    yield group


def follower(device: torch.device) -> Callable[[Tensor, tuple[int, int], torch.dtype, Tensor], None]:
    """What runs tables on this device; see `kernels.follow`."""
    if device.type == "cpu":
        from vitwire_server.preparing.device.host import follow  # noqa: PLC0415 - one or the other
    else:
        from vitwire_server.preparing.device.kernels import follow  # noqa: PLC0415 - needs Triton
    return follow


def _run(frames: Sequence[Part], device: torch.device, dtype: torch.dtype, scales: Tensor) -> None:
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
    for table, own in zip(tables, on_device, strict=True):
        follow(own, _largest(table), dtype if table is tables[-1] else torch.uint8, scales)


def _largest(table: Table) -> tuple[int, int]:
    """The most rows and columns of a canvas."""
    return int(table[:, Field.DOWN].max()), int(table[:, Field.ACROSS].max())


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
def _affine(settings: tuple[Preprocessing, ...], device: torch.device) -> Tensor:
    """Of pixels and of crops of each: scale and offset, `(pairs, 2, 3)` float32."""
    pairs = [affine(each) for own in settings for each in (own, own.of_crops)]
    return _moved(np.array(pairs, np.float32), device)
