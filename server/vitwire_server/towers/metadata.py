"""Metadata that transformers' towers compute from `grid_thw`, laid into buffers of a fixed size.

transformers' `vision_utils` takes each of these tensors from the caller's keyword arguments when
it is given. With all of them given, the stock forward has no host synchronisation and no
data-dependent shape, so it can be captured and padded: padding rows are attention segments of
their own at the tail. A few kinds of metadata cover the packed towers.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Capacity:
    """Sizes that the metadata of one forward is laid out for."""

    patches: int
    tokens: int
    segments: int
    """Slots for attention segments, padding included."""
    longest: int
    """Bound of the longest segment, in patches: the forward's `max_seqlen`."""
    windows: int = 0
    """Slots for attention windows, padding included; 0 in towers without windows."""
    crops: int = 0
    """Rows of crops, in towers that take them."""


class Kind(ABC):
    """One kind of metadata: laid into a buffer, item after item, padding behind them."""

    on_host: ClassVar[bool] = False
    """An item's own metadata is kept on the host rather than on the device."""

    @abstractmethod
    def allocate(self, capacity: Capacity, device: torch.device) -> Tensor:
        """A buffer for `capacity`; `lay` must run before the forward reads it."""

    def lay(self, buffer: Tensor, measured: Sequence[Tensor], patches: Sequence[int], capacity: Capacity) -> None:
        """Lay out items of these `patches`, each `measured` as if it were alone.

        Does not synchronise with the device. Raises ValueError if the buffer has too few slots.
        """
        _copy(measured, buffer)


@dataclass(frozen=True, slots=True)
class Rows(Kind):
    """One row for each patch, token or segment. Padding keeps what lay there before: a row of any grid is valid."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    per: Literal["patches", "tokens", "segments"] = "patches"
    initial: int = 0

    def allocate(self, capacity: Capacity, device: torch.device) -> Tensor:
        rows: int = getattr(capacity, self.per)
        return torch.full((rows, *self.shape), self.initial, dtype=self.dtype, device=device)


@dataclass(frozen=True, slots=True)
class Sources(Kind):
    """Where each token is gathered from: `(tokens, sources)` int64, numbers within the item laid out from its start.

    Padding keeps what lay there before, which is the number of some row.
    """

    columns: int
    patches: int = 1
    """Patches of one numbered row."""
    per_patch: bool = False
    """Each patch, rather than each token, is gathered."""

    def allocate(self, capacity: Capacity, device: torch.device) -> Tensor:
        rows = capacity.patches if self.per_patch else capacity.tokens
        return torch.zeros((rows, self.columns), dtype=torch.int64, device=device)

    def lay(self, buffer: Tensor, measured: Sequence[Tensor], patches: Sequence[int], capacity: Capacity) -> None:
        firsts = [used // self.patches for used in accumulate(patches[:-1], initial=0)]
        _copy(_counted_on(measured, firsts), buffer)


@dataclass(frozen=True, slots=True)
class Order(Kind):
    """A permutation of the tokens, `(tokens,)` int64, identity on padding."""

    per_patch: bool = False
    """The patches, rather than the tokens, are permuted."""

    def allocate(self, capacity: Capacity, device: torch.device) -> Tensor:
        return torch.arange(capacity.patches if self.per_patch else capacity.tokens, device=device)

    def lay(self, buffer: Tensor, measured: Sequence[Tensor], patches: Sequence[int], capacity: Capacity) -> None:
        ends = list(accumulate((len(order) for order in measured), initial=0))
        _copy(_counted_on(measured, ends[:-1]), buffer)
        if (at := ends[-1]) < len(buffer):
            torch.arange(at, len(buffer), out=buffer[at:])


@dataclass(frozen=True, slots=True)
class Boundaries(Kind):
    """Cumulative ends of attention segments, `(slots + 1,)` int32, the first of them 0.

    They are few, so they are joined on the host, by numpy: unlike torch it does not give up the interpreter, which
    another thread would then have for a while. The last end always equals the capacity in
    patches, since attention kernels leave rows outside the boundaries unwritten. Padding rows form
    segments of at most `longest` patches; slots that are left over repeat the last end, which makes
    them empty segments.
    """

    slots: Callable[[Capacity], int]
    longest: Callable[[Capacity], int]
    on_host = True

    def allocate(self, capacity: Capacity, device: torch.device) -> Tensor:
        return torch.zeros(self.slots(capacity) + 1, dtype=torch.int32, device=device)

    def lay(self, buffer: Tensor, measured: Sequence[Tensor], patches: Sequence[int], capacity: Capacity) -> None:
        host = torch.empty(buffer.shape, dtype=torch.int32, pin_memory=buffer.is_cuda)
        ends = [own.numpy() + used for own, used in zip(measured, accumulate(patches[:-1], initial=0), strict=True)]
        end = sum(patches)
        padding = range(end + self.longest(capacity), capacity.patches, self.longest(capacity))
        used = 1 + sum(map(len, ends)) + len(padding)
        if used + (end < capacity.patches) > len(host):
            raise ValueError(f"{self.slots(capacity)} segments are too few for {len(measured)} items")
        numbers = host.numpy()
        np.concatenate([(0,), *ends, padding], out=numbers[:used], casting="unsafe")
        numbers[used:] = capacity.patches
        buffer.copy_(host, non_blocking=True)


def _counted_on(measured: Sequence[Tensor], firsts: Sequence[int]) -> Sequence[Tensor]:
    """Numbers of each item, with what they start from added."""
    if len(measured) < 2:
        return measured
    return torch._foreach_add(list(measured), list(firsts))  # noqa: SLF001 - one kernel for all items


def _copy(measured: Sequence[Tensor], buffer: Tensor) -> None:
    """Copy each item's rows behind the one before."""
    if len(measured) == 1:
        buffer[: len(measured[0])].copy_(measured[0])
    elif measured:
        counts = [len(rows) for rows in measured]
        targets = torch.split(buffer[: sum(counts)], counts)
        torch._foreach_copy_(list(targets), list(measured))  # one kernel for all items
