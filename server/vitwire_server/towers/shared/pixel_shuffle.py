"""Pixel shuffle: squares of patches become tokens."""

from torch import Tensor

from vitwire_server.towers.configs import Config

SHUFFLED = "1 divided by a whole number"
"""What `shuffles` asks for, in words."""


MLP1 = {"mlp1.0.": "layer_norm.", "mlp1.1.": "linear_1.", "mlp1.3.": "linear_2."}
"""Prefixes of the projector behind it in checkpoints of OpenGVLab and of makers who follow its layout."""


def shuffles(ratio: float, _: Config) -> bool:
    """Whether shuffling pixels by this ratio makes squares of patches to tokens."""
    return round(1 / ratio) * ratio == 1


def shuffled(patches: Tensor, merge: int) -> Tensor:
    """`(tiles, side * side, C)` to `(tiles, tokens, C * merge * merge)`, patches of a token one after the other."""
    short = round(patches.shape[1] ** 0.5) // merge
    tokens: Tensor = patches.unflatten(1, (short, merge, short, merge)).permute(0, 1, 3, 2, 4, 5)
    return tokens.flatten(3).flatten(1, 2)
