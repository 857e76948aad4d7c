"""CLIP's tower for tiles, and rows of chosen layers of a tower of its kind."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vitwire_server.towers.family import Module, in_model


def clip(name: str) -> Module:
    """CLIP's tower by this name, its weights within `vision_model.` or not; older files hold its position ids too."""
    return Module(
        source="clip.modeling_clip:CLIPVisionModel",
        prefixes=in_model(f"{name}vision_model.", name),
        ignored=("embeddings.position_ids",),
    )


class LayerRows:
    """Rows of CLIP's or SigLIP's tower after some of its layers, before the last norm, side by side.

    Layers are numbered as transformers numbers hidden states: 0 is before the first layer, -1 after the last one.
    """

    def __init__(self, tower: Any, layers: int | Sequence[int]) -> None:  # noqa: ANN401 - typed in part only
        """Raises ValueError over a layer that the tower does not have."""
        own = list(tower.encoder.layers)
        self._tower = tower
        self._chosen = [_number(layer, len(own)) for layer in ([layers] if isinstance(layers, int) else layers)]
        self.blocks: Sequence[nn.Module] = own[: max(self._chosen)]
        """The layers that are computed: none behind the last one that is chosen."""

    def __call__(self, tiles: Tensor) -> Tensor:
        """`(tiles, C, H, W)` to `(tiles, rows, width * layers)`; CLIP's class token is the first row."""
        states: Tensor = self._tower.embeddings(tiles)
        if hasattr(self._tower, "pre_layrnorm"):  # CLIP's; spelled so in every checkpoint
            states = self._tower.pre_layrnorm(states)
        kept = {0: states}
        for number, block in enumerate(self.blocks, start=1):
            states = block(states, None)
            if number in self._chosen:
                kept[number] = states
        return torch.cat([kept[number] for number in self._chosen], dim=-1)


def _number(layer: int, layers: int) -> int:
    if not -layers - 1 <= layer <= layers:
        raise ValueError(f"vision_feature_layer {layer} is not served, as the tower has {layers} layers")
    return layer % (layers + 1)
