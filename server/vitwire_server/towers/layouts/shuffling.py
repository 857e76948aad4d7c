"""Pixel shuffle: which ratios make squares of patches to tokens."""

from typing import Any

SHUFFLED = "1 divided by a whole number"
"""What `shuffles` asks for, in words."""


def shuffles(ratio: float, _: Any) -> bool:  # noqa: ANN401
    """Whether shuffling pixels by this ratio makes squares of patches to tokens."""
    return round(1 / ratio) * ratio == 1
