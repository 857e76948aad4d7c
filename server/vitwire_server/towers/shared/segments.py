"""Sums over packed segments: in a fixed order, so that replays of a graph return the same bits."""

import torch
from torch import Tensor

_CHUNK = 16


def numbers(boundaries: Tensor, count: int) -> Tensor:
    """The number of the segment of each of `count` rows; rows behind the last one have that of one more."""
    places = torch.arange(count, dtype=boundaries.dtype, device=boundaries.device)
    return torch.searchsorted(boundaries, places, right=True) - 1


def summed(rows: Tensor, boundaries: Tensor, longest: int) -> Tensor:
    """The sum of the rows of each segment, of at most `longest` rows: that of chunks, then of their sums, and so on.

    Adding rows to their segment by index would leave the order to CUDA. No shape depends on values: chunks are as
    many as there could be, of which those left over hold no row. NaN and infinity stay in their segment.
    """
    segments = len(boundaries) - 1
    while longest > 1:
        lengths = boundaries.diff()
        ends = ((lengths + (_CHUNK - 1)) // _CHUNK).cumsum(0, dtype=boundaries.dtype)
        firsts = torch.cat([ends.new_zeros(1), ends])
        count = len(rows) // _CHUNK + segments
        own = numbers(firsts, count).clamp(max=segments - 1)
        chunks = torch.arange(count, dtype=boundaries.dtype, device=boundaries.device) - firsts[own]
        places = (boundaries[own] + chunks * _CHUNK)[:, None] + torch.arange(_CHUNK, device=boundaries.device)
        rows = _held(rows, places, places < boundaries[own + 1][:, None]).sum(1)
        boundaries, longest = firsts, -(-longest // _CHUNK)
    return _held(rows, boundaries[:-1].long(), boundaries.diff() > 0)


def _held(rows: Tensor, places: Tensor, held: Tensor) -> Tensor:
    """Rows at these places; zeros where nothing is held there."""
    found = rows[places.clamp(max=len(rows) - 1)]
    return found.masked_fill(~held.view(*held.shape, *[1] * (rows.ndim - 1)), 0)
