"""Tiles of prompts, padded to one number."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPooling

from vitwire.integrations.transformers._layout import Call, Features, Layout


def of_prompts(real: Callable[[Call], Tensor], others: Callable[[Call], Mapping[str, Any]] = lambda _: {}) -> Layout:
    """Models that take tiles `(prompts, tiles, 3, H, W)` and return the rows of each prompt, which may have none.

    real: which tiles `(prompts, tiles)` are not padding. others: arguments that are checked too.
    """

    def features(call: Call, rows: list[Tensor]) -> Features:
        return [own.flatten(0, 1) for own in torch.stack(rows).split(real(call).sum(1).tolist())]

    return Layout(
        arguments=lambda call: {"pixel_values": call.pixels[real(call)], **others(call)},
        tiles=lambda call: [1] * int(real(call).sum()),
        features=features,
    )


def filled_tiles(call: Call) -> Tensor:
    """Those that are not zeros; all if all are."""
    real = (call.pixels != 0).flatten(2).any(-1)
    return real if real.any() else torch.ones_like(real)


def whole_tiles(call: Call) -> Tensor:
    """The same. Raises ValueError where a mask covers a part of a tile."""
    real, mask = filled_tiles(call), call.arguments.get("pixel_attention_mask")
    if mask is not None and not mask[real].all():
        raise ValueError("pixel_attention_mask covers a part of a tile, which is not served: resize to whole tiles")
    return real


def marked_tiles(call: Call) -> Tensor:
    marks: Tensor = call.arguments["pixel_attention_mask"]
    return marks


def path_of_docling(call: Call) -> Mapping[str, Any]:
    """Of Granite for Docling's two paths, the one that the caller asks for."""
    return {"tile_fine_mask": call.arguments.get("tile_fine_mask")}


def routed_output(**fields: Any) -> BaseModelOutputWithPooling:  # noqa: ANN401  # fields of the output
    """With a field for the router's opinion, which generation does not need."""
    from transformers.models.granite_docling import modeling_granite_docling  # noqa: PLC0415  # of one model

    output: BaseModelOutputWithPooling = modeling_granite_docling.GraniteDoclingImageFeaturesOutput(**fields)
    return output
