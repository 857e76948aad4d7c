"""A model's feature method that calls the service: its arguments as items, and rows as what the method returns.

Arguments are named as in the outputs of the models' processors, so `Item.from_processor` makes the items.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import Signature
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.qwen3_vl.modeling_qwen3_vl import BaseModelOutputWithDeepstackFeatures

from vitwire.embeddings import Embedding
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


@dataclass(frozen=True, slots=True)
class Layout:
    """One way of taking pixels."""

    arguments: Callable[[Call], Mapping[str, Any]] = lambda call: call.arguments
    """Content of the items, in the form of a processor's output."""
    tiles: Callable[[Call], list[int] | list[tuple[int, int, int]] | None] = lambda _: None
    """Numbers of tiles of each item, or its grid, if the arguments do not say them."""
    features: Callable[[Call, list[Tensor]], Any] = lambda _, rows: rows
    """From the rows of each item to `pooler_output` of what the model's method returns, or to what a module returns."""
    deepstack_output: Callable[..., BaseModelOutputWithPooling] = BaseModelOutputWithDeepstackFeatures
    """Class with the features of several layers as named fields."""
    added: Callable[[Any], Mapping[str, Tensor]] = lambda _: {}
    """From the model, while it has its tower, to rows of that tower that do not depend on the pixels."""
    before_projector: bool = False
    """The model projects what the method returns as `last_hidden_state`."""
    beside: Callable[[Call], Mapping[str, Tensor]] = lambda _: {}
    """Other fields of the method's output, which do not depend on the pixels."""

    replaces: str = ""
    """Path of the module whose `forward` is replaced, in models without feature methods."""
    attributes: tuple[str, ...] = ()
    """Attributes that the model reads from that module."""
    cut: Callable[[Mapping[str, Any]], list[Item]] | None = None
    """From the arguments to items, if these differ from those of other clients."""

    def items(self, call: Call, described: Model) -> list[Item]:
        """Raises InvalidItem for arguments that contradict each other, and ValueError for those with a gradient."""
        dtype: torch.dtype = getattr(torch, described.dtype, torch.float32)
        outputs = {name: _sent(name, value, dtype) for name, value in self.arguments(call).items()}
        if self.cut:
            return self.cut(outputs)
        return Item.from_processor(outputs, described, grid_thw=self.tiles(call))


def _sent(name: str, value: object, dtype: torch.dtype) -> object:
    """Pixels in the dtype that the service converts them to, if it is narrower; other arguments as they are."""
    if not isinstance(value, Tensor) or "pixel_values" not in name:
        return value
    if value.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name} requires a gradient, which a remote vision tower cannot compute; detach it first")
    return value.to(dtype) if value.dtype == torch.float32 else value


class Encoder(Protocol):
    """The methods of `vitwire.Client` in use."""

    def model(self) -> Model: ...

    def encode(self, items: Sequence[Item]) -> list[Embedding]: ...


@dataclass(eq=False)
class RemoteFeatures:
    """Replaces a model's `get_image_features` or `get_video_features`, or a module's `forward`.

    The rows are on the device of the embedding layer and in its dtype. No gradient flows through them. Of the
    output's fields only those are set that the language model reads.
    """

    model: PreTrainedModel
    arguments: Signature
    modality: Modality
    layout: Layout
    client: Encoder
    described: Model

    def __post_init__(self) -> None:
        self._added = self.layout.added(self.model)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: object, **kwargs: object) -> object:
        """Raises as `Layout.items` and `Client.encode`."""
        call = Call(self.model, self.modality, self.arguments.bind(*args, **kwargs).arguments, self._added)
        items = self.layout.items(call, self.described)
        rows = [self._placed(each.torch(), call) for each in self.client.encode(items)]
        parts = 1 + self.described.deepstack_levels
        if self.layout.replaces:
            return self.layout.features(call, rows)
        levels = list(zip(*(each.chunk(parts, dim=-1) for each in rows), strict=True))
        output = self._output(*(self.layout.features(call, list(level)) for level in levels))
        for name, value in self.layout.beside(call).items():
            setattr(output, name, value)
        return output.to_tuple() if kwargs.get("return_dict") is False else output

    def _placed(self, rows: Tensor, call: Call) -> Tensor:
        """Rows where the language model takes them; an embedding layer that is offloaded has no device."""
        weight: Any = self.model.get_input_embeddings().weight
        device = call.pixels.device if weight.is_meta else weight.device
        return rows.to(device, weight.dtype if weight.is_floating_point() else self.model.dtype)

    def _output(self, features: Features, *deepstack: Features) -> BaseModelOutputWithPooling:
        fields: dict[str, Any] = {"pooler_output": features}
        if self.layout.before_projector:
            fields["last_hidden_state"] = features
        if deepstack:
            fields["deepstack_features"] = list(deepstack)
            return self.layout.deepstack_output(**fields)
        return BaseModelOutputWithPooling(**fields)
