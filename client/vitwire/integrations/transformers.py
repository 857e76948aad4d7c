"""A Hugging Face vision-language model whose vision tower runs in a Vitwire service.

    model = AutoModelForImageTextToText.from_pretrained(...)
    with Client("encoder:50051") as client:
        attach(model, client)
        model.generate(**inputs)

Works for models with a grid_thw tower as `visual`: Qwen2-VL, Qwen2.5-VL, Qwen3-VL and related models.
"""

from collections.abc import Sequence
from inspect import signature
from itertools import pairwise
from typing import Any, Protocol, cast

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.qwen3_vl.modeling_qwen3_vl import BaseModelOutputWithDeepstackFeatures

from vitwire._embedding import Embedding
from vitwire._items import Item
from vitwire._model import Model


class Encoder(Protocol):
    """The methods of `vitwire.Client` in use."""

    def model(self) -> Model: ...

    def encode(self, items: Sequence[Item]) -> list[Embedding]: ...


class RemoteTower(nn.Module):
    """Replaces the tower `original`: the same forward, without weights.

    Rows are returned on the device and in the dtype of `place`, which moves with the model.
    """

    def __init__(self, original: PreTrainedModel, client: Encoder, place: torch.Tensor, levels: int) -> None:
        super().__init__()
        self._place: torch.Tensor
        self.register_buffer("_place", place.new_empty(0), persistent=False)
        self._original = (original,)  # in a tuple, so that it is not a submodule
        self._client = client
        self._levels = levels
        self._deepstack = hasattr(original.config, "deepstack_visual_indexes")
        self.config: Any = original.config
        self.spatial_merge_size: int = self.config.spatial_merge_size
        self.spatial_merge_unit = self.spatial_merge_size**2

    @property
    def original(self) -> PreTrainedModel:
        """The replaced tower."""
        return self._original[0]

    @property
    def dtype(self) -> torch.dtype:
        return self._place.dtype

    @property
    def device(self) -> torch.device:
        return self._place.device

    def forward(
        self,
        hidden_states: torch.Tensor,
        grid_thw: torch.Tensor,
        **_: object,  # options of the local tower
    ) -> BaseModelOutputWithPooling:
        """Encode patches `(sum of t*h*w, C*T*p*p)` of items with the grids `(items, 3)`.

        Returns `pooler_output` of `(tokens, width)` and, for deepstack towers, `deepstack_features`; there is
        no `last_hidden_state`. Raises ValueError when patches and grids disagree, else as `Client.encode`.
        """
        items = _items(hidden_states, [(t, h, w) for t, h, w in grid_thw.tolist()])
        rows = torch.cat([embedding.torch() for embedding in self._client.encode(items)])
        main, *deepstack = rows.to(self.device, self.dtype).chunk(1 + self._levels, dim=-1)
        if self._deepstack:
            return BaseModelOutputWithDeepstackFeatures(pooler_output=main, deepstack_features=deepstack)
        return BaseModelOutputWithPooling(pooler_output=main)

    def extra_repr(self) -> str:
        return f"{self.config.model_type}, levels={self._levels}"


def attach(model: PreTrainedModel, client: Encoder) -> RemoteTower:
    """Replace the model's vision tower by a `RemoteTower`, and return it.

    The original is kept for `detach` where it is: to free device memory, move `.original` to the CPU.
    Raises ValueError if the model has no such tower or the service has another one, and the errors of
    `client.model()`.
    """
    owner = _owner(model)
    original = cast("PreTrainedModel", owner.get_submodule("visual"))
    if isinstance(original, RemoteTower):
        raise ValueError("the model's vision tower is already remote; detach it first")
    if not {"hidden_states", "grid_thw"} <= signature(original.forward).parameters.keys():
        raise ValueError(f"{type(original).__name__} does not take hidden_states and grid_thw; it cannot be replaced")
    levels = _check(getattr(model.config, "model_type", ""), original.config, client.model())
    place: Any = model.get_input_embeddings().weight
    remote = RemoteTower(original, client, place.detach(), levels)
    owner.visual = remote
    return remote


def detach(model: PreTrainedModel) -> None:
    """Restore the original tower. Raises ValueError if it was not replaced."""
    owner = _owner(model)
    remote = owner.get_submodule("visual")
    if not isinstance(remote, RemoteTower):
        raise ValueError("the model's vision tower is not remote; there is nothing to detach")
    owner.visual = remote.original


def _owner(model: PreTrainedModel) -> nn.Module:
    """The module that has the tower as `visual`."""
    for candidate in (model, *(child for name, child in model.named_children() if name == "model")):
        if any(name == "visual" for name, _ in candidate.named_children()):
            return candidate
    raise ValueError(f"{type(model).__name__} has no vision tower as `visual` or `model.visual`")


def _check(model_type: str, vision: PretrainedConfig, remote: Model) -> int:
    """The number of deepstack levels. Raises ValueError if the service has another tower than the model."""
    if remote.model_type != model_type:
        raise ValueError(
            f"the service has {remote.model_id}, a {remote.model_type or 'nameless'} tower; the model is a {model_type}"
        )
    levels = len(getattr(vision, "deepstack_visual_indexes", None) or ())
    width = getattr(vision, "out_hidden_size", None) or vision.hidden_size
    if (remote.deepstack_levels, remote.embedding_width) != (levels, width * (1 + levels)):
        raise ValueError(
            f"the service's embeddings are {remote.embedding_width} wide with {remote.deepstack_levels} "
            f"deepstack levels, the model expects {width * (1 + levels)} with {levels}"
        )
    return levels


def _items(patches: torch.Tensor, grids: Sequence[tuple[int, int, int]]) -> list[Item]:
    ends = [0]
    for t, h, w in grids:
        ends.append(ends[-1] + t * h * w)
    if ends[-1] != len(patches):
        raise ValueError(f"the grids have {ends[-1]} patches, got {len(patches)}")
    return [
        Item(patches[start:end], grid, "video" if grid[0] > 1 else "image")
        for grid, (start, end) in zip(grids, pairwise(ends), strict=True)
    ]
