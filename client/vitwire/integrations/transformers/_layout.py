"""How a model takes pixels: from the arguments of its feature methods to items, and from rows to features.

The arguments are named as in the outputs of the models' processors, so `Item.from_processor` makes the items.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.qwen3_vl.modeling_qwen3_vl import BaseModelOutputWithDeepstackFeatures

from vitwire.items import Item, Modality
from vitwire.model import Model

Features = Tensor | Sequence[Tensor]


@dataclass(frozen=True, slots=True)
class Call:
    """One call of `get_image_features` or `get_video_features`."""

    model: Any
    """The module whose method is called, a PreTrainedModel."""
    modality: Modality
    arguments: Mapping[str, Any]
    """By the names in the method's signature."""
    added: Mapping[str, Tensor] = field(default_factory=dict)
    """Rows that do not depend on the pixels, and that the service does not send."""

    @property
    def pixels(self) -> Tensor:
        """The main argument."""
        names = ("pixel_values_videos",) if self.modality == "video" else ("pixel_values", "image_pixel_values")
        pixels: Tensor = next(self.arguments[name] for name in names if name in self.arguments)
        return pixels


def _each(call: Call, rows: list[Tensor]) -> Features:
    del call
    return rows


def _given(call: Call) -> Mapping[str, Any]:
    return call.arguments


@dataclass(frozen=True, slots=True)
class Layout:
    """One way of taking pixels."""

    arguments: Callable[[Call], Mapping[str, Any]] = _given
    """What the items are made of, in the form of a processor's output."""
    tiles: Callable[[Call], list[int] | list[tuple[int, int, int]] | None] = lambda _: None
    """Numbers of tiles of each item, or its grid, where the arguments do not say them."""
    features: Callable[[Call, list[Tensor]], Features] = _each
    """From the rows of each item to what the model's own method returns as `pooler_output`."""
    deepstack_output: Callable[..., BaseModelOutputWithPooling] = BaseModelOutputWithDeepstackFeatures
    """What holds the features of several layers, which are fields of it by name."""
    added: Callable[[Any], Mapping[str, Tensor]] = lambda _: {}
    """From the model, while it has its tower, to rows of that tower that do not depend on the pixels."""
    before_projector: bool = False
    """The model projects what the method returns as `last_hidden_state`."""
    beside: Callable[[Call], Mapping[str, Tensor]] = lambda _: {}
    """Other fields of the method's output, which do not depend on the pixels."""

    replaces: str = ""
    """Path of the module whose `forward` is replaced, in models without feature methods."""
    returns: Callable[[Call, list[Tensor]], Any] = _each
    """From the rows of each item to what that `forward` returns."""
    attributes: tuple[str, ...] = ()
    """What the model reads of that module."""
    cut: Callable[[Mapping[str, Any]], list[Item]] | None = None
    """From the arguments to items, where these are not as for other clients."""

    def items(self, call: Call, described: Model) -> list[Item]:
        """Raises InvalidItem for arguments that contradict each other, and ValueError for those with a gradient."""
        dtype: torch.dtype = getattr(torch, described.dtype, torch.float32)
        outputs = {name: _sent(name, value, dtype) for name, value in self.arguments(call).items()}
        if self.cut:
            return self.cut(outputs)
        return Item.from_processor(outputs, described, grid_thw=self.tiles(call))


def _sent(name: str, value: Any, dtype: torch.dtype) -> Any:  # noqa: ANN401  # any argument
    """Pixels in the dtype that the service converts them to, if it is narrower; other arguments as they are."""
    if not isinstance(value, Tensor) or "pixel_values" not in name:
        return value
    if value.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name} requires a gradient, which a remote vision tower cannot compute; detach it first")
    return value.to(dtype) if value.dtype == torch.float32 else value


def stacked(call: Call, rows: list[Tensor]) -> Features:
    del call
    return torch.stack(rows)


def joined(call: Call, rows: list[Tensor]) -> Features:
    del call
    return torch.cat(rows)


def one_each(call: Call) -> list[int]:
    """Each tile by itself: which tiles are of one image is not known here, and no row depends on it."""
    return [1] * len(call.pixels)


def one_each_unless_listed(call: Call) -> list[int] | None:
    """Pixtral's processor gives the sizes of images, which are not tiles."""
    return None if call.arguments.get("image_sizes") is not None else one_each(call)
