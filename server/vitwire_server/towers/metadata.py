"""What transformers' towers compute from `grid_thw`, computed ahead and laid into buffers.

transformers' `vision_utils` takes each of these tensors from the caller's keyword arguments when
it is given. With all of them given, the stock forward has no host synchronisation and no
data-dependent shape, so it can be captured and padded: padding rows are attention segments of
their own at the tail. Three kinds of metadata cover the packed towers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from vitwire_server.core.grids import Grid


@dataclass(frozen=True, slots=True)
class Capacity:
    """Sizes that the metadata of one forward is laid out for."""

    patches: int
    tokens: int
    segments: int
    """Slots for attention segments, those of padding included."""
    longest: int
    """Bound of the longest segment, in patches: the forward's `max_seqlen`."""
    windows: int = 0
    """Slots for attention windows, those of padding included; 0 in towers without windows."""


class Part(Protocol):
    """One kind of metadata: measured per grid, then laid into a buffer beside others."""

    def measure(self, grid: Grid, device: torch.device) -> Tensor:
        """The metadata of an item that is alone in its forward; kept per grid by the tower."""
        ...

    def allocate(self, capacity: Capacity, device: torch.device) -> Tensor:
        """A buffer for `capacity`; `lay` must run before the forward reads it."""
        ...

    def lay(self, buffer: Tensor, measured: Sequence[Tensor], grids: Sequence[Grid], capacity: Capacity) -> None:
        """Lay items out one after the other, and make the rest of the buffer padding."""
        ...


@dataclass(frozen=True, slots=True)
class Rows:
    """One row per patch. Padding keeps what lay there before: a row of any grid is a valid row."""

    compute: Callable[[Tensor], Tensor]
    """`grid_thw (1, 3)` to `(patches, columns)`."""

    def measure(self, grid: Grid, device: torch.device) -> Tensor:
        return self.compute(torch.tensor([grid])).to(device)

    def allocate(self, capacity: Capacity, device: torch.device) -> Tensor:
        sample = self.compute(torch.tensor([[1, 2, 2]]))
        return torch.zeros((capacity.patches, *sample.shape[1:]), dtype=sample.dtype, device=device)

    def lay(self, buffer: Tensor, measured: Sequence[Tensor], grids: Sequence[Grid], capacity: Capacity) -> None:
        at = 0
        for rows in measured:
            buffer[at : at + len(rows)].copy_(rows)
            at += len(rows)


@dataclass(frozen=True, slots=True)
class Order:
    """A permutation of the tokens, int64, identity on padding."""

    compute: Callable[[Tensor], Tensor]
    """`grid_thw (1, 3)` to `(tokens,)`."""

    def measure(self, grid: Grid, device: torch.device) -> Tensor:
        return self.compute(torch.tensor([grid])).to(device)

    def allocate(self, capacity: Capacity, device: torch.device) -> Tensor:
        return torch.arange(capacity.tokens, device=device)

    def lay(self, buffer: Tensor, measured: Sequence[Tensor], grids: Sequence[Grid], capacity: Capacity) -> None:
        at = 0
        for order in measured:
            torch.add(order, at, out=buffer[at : at + len(order)])
            at += len(order)
        if at < capacity.tokens:
            torch.arange(at, capacity.tokens, out=buffer[at:])


@dataclass(frozen=True, slots=True)
class Boundaries:
    """Cumulative ends of attention segments, int32. They are few, so they are joined on the host.

    The last end always equals the capacity in patches, since attention kernels leave rows outside
    the boundaries unwritten. Padding rows form segments of at most `longest` patches; slots that
    are left over repeat the last end, which makes them empty segments.
    """

    compute: Callable[[Tensor], Tensor]
    """`grid_thw (1, 3)` to `(segments + 1,)`, the first of them 0."""
    slots: Callable[[Capacity], int]
    longest: Callable[[Capacity], int]

    def measure(self, grid: Grid, device: torch.device) -> Tensor:
        return self.compute(torch.tensor([grid]))[1:].to(torch.int32)

    def allocate(self, capacity: Capacity, device: torch.device) -> Tensor:
        return torch.zeros(self.slots(capacity) + 1, dtype=torch.int32, device=device)

    def lay(self, buffer: Tensor, measured: Sequence[Tensor], grids: Sequence[Grid], capacity: Capacity) -> None:
        host = torch.full(buffer.shape, capacity.patches, dtype=torch.int32)
        host[0] = 0
        at, patches = 1, 0
        for ends, grid in zip(measured, grids, strict=True):
            torch.add(ends, patches, out=host[at : at + len(ends)])
            at += len(ends)
            patches += grid.patches
        padding = range(patches + self.longest(capacity), capacity.patches, self.longest(capacity))
        if at + len(padding) + (patches < capacity.patches) > len(host):
            raise ValueError(f"{self.slots(capacity)} segments are too few for {list(grids)}")
        if padding:
            host[at : at + len(padding)] = torch.tensor(padding, dtype=torch.int32)
        buffer.copy_(host, non_blocking=True)
