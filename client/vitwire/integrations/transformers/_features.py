"""A model's feature method that calls the service."""

from collections.abc import Sequence
from inspect import Signature
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling

from vitwire.embeddings import Embedding
from vitwire.integrations.transformers._layout import Call, Features, Layout
from vitwire.items import Item, Modality
from vitwire.model import Model

Output = BaseModelOutputWithPooling


class Encoder(Protocol):
    """The methods of `vitwire.Client` in use."""

    def model(self) -> Model: ...

    def encode(self, items: Sequence[Item]) -> list[Embedding]: ...


class RemoteFeatures:
    """Replaces a model's `get_image_features` or `get_video_features`, or a module's `forward`.

    The rows are on the device of the embedding layer and in its dtype. No gradient flows through them. Of the
    output's fields only those are set that the language model reads.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        arguments: Signature,
        modality: Modality,
        layout: Layout,
        client: Encoder,
        described: Model,
    ) -> None:
        """`arguments` are those of what it replaces."""
        self._signature = arguments
        self._model = model
        self._modality = modality
        self._layout = layout
        self._added = layout.added(model)
        self._client = client
        self._described = described

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  # those of the original
        """Raises as `Layout.items` and `Client.encode`."""
        call = Call(self._model, self._modality, self._signature.bind(*args, **kwargs).arguments, self._added)
        items = self._layout.items(call, self._described)
        rows = [self._placed(each.torch(), call) for each in self._client.encode(items)]
        parts = 1 + self._described.deepstack_levels
        if self._layout.replaces:
            return self._layout.returns(call, rows)
        levels = list(zip(*(each.chunk(parts, dim=-1) for each in rows), strict=True))
        output = self._output(*(self._layout.features(call, list(level)) for level in levels))
        for name, value in self._layout.beside(call).items():
            setattr(output, name, value)
        return output.to_tuple() if kwargs.get("return_dict") is False else output

    def _placed(self, rows: Tensor, call: Call) -> Tensor:
        """Rows where the language model takes them; an embedding layer that is offloaded has no device."""
        weight: Any = self._model.get_input_embeddings().weight
        device = call.pixels.device if weight.is_meta else weight.device
        return rows.to(device, weight.dtype if weight.is_floating_point() else self._model.dtype)

    def _output(self, features: Features, *deepstack: Features) -> Output:
        fields: dict[str, Any] = {"pooler_output": features}
        if self._layout.before_projector:
            fields["last_hidden_state"] = features
        if deepstack:
            fields["deepstack_features"] = list(deepstack)
            return self._layout.deepstack_output(**fields)
        return BaseModelOutputWithPooling(**fields)
