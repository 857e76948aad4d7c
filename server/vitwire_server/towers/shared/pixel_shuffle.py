"""Pixel shuffle: which ratios make squares of patches to tokens."""

from vitwire_server.towers.configs import Config

SHUFFLED = "1 divided by a whole number"
"""What `shuffles` asks for, in words."""


def shuffles(ratio: float, _: Config) -> bool:
    """Whether shuffling pixels by this ratio makes squares of patches to tokens."""
    return round(1 / ratio) * ratio == 1
