"""How attention divides its rows among programs."""

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton

_FEW_ROWS = 64
_MANY_ROWS = 128
_PROCESSORS = 132
"""Multiprocessors where they are not known: those of the device that the rules were measured on."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The tiles, and the programs that work on them."""

    rows: int
    """Of a tile."""
    warps: int
    stages: int
    programs: int = 0
    """They take tiles and heads in turn; 0: a program for each."""


def shape_of(rows: int, heads: int, longest: int, device: torch.device) -> Shape:
    """Small tiles if there are few; large ones, by eight warps if they are still few (times: docs/performance.md).

    Programs that take turns skip the tiles of empty slots at once.
    """
    processors = _processors(device)
    few, many = (triton.cdiv(rows, each) * heads for each in (_FEW_ROWS, _MANY_ROWS))
    if few <= processors:
        return Shape(_FEW_ROWS, warps=4, stages=3, programs=processors)
    if many > 2 * processors:
        return Shape(_MANY_ROWS, warps=4, stages=3)
    if longest <= _FEW_ROWS:
        return Shape(_FEW_ROWS, warps=4, stages=2)
    return Shape(_MANY_ROWS, warps=8 if many <= processors else 4, stages=3, programs=2 * processors)


@lru_cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return _PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count
