"""A Hugging Face vision-language model whose vision tower runs in a Vitwire service.

    model = AutoModelForImageTextToText.from_pretrained(...)
    with Client("encoder:50051") as client:
        attach(model, client)
        model.generate(**inputs)

Works for models that hold a grid_thw tower as `visual`: Qwen2-VL, Qwen2.5-VL, Qwen3-VL and their relatives.
"""

from collections.abc import Sequence
from inspect import signature
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.qwen3_vl.modeling_qwen3_vl import BaseModelOutputWithDeepstackFeatures

from vitwire._embedding import Embedding
from vitwire._items import Item
from vitwire._model import Model


class Encoder(Protocol):
    """What is asked of the client; `vitwire.Client` has it."""

    def model(self) -> Model: ...

    def encode(self, items: Sequence[Item]) -> list[Embedding]: ...


class RemoteTower(nn.Module):
    """Stands for the tower `original`: same forward, no weights.

    Its rows come on the device and in the dtype of `place`, and follow the model when that is moved.
    """

    def __init__(self, original: PreTrainedModel, client: Encoder, place: torch.Tensor, levels: int) -> None:
        super().__init__()
        self._place: torch.Tensor
        self.register_buffer("_place", place.new_empty(0), persistent=False)
        self._original = (original,)  # in a tuple, so that it is no submodule
        self._client = client
        self._levels = levels
        self._deepstack = hasattr(original.config, "deepstack_visual_indexes")
        self.config: Any = original.config
        self.spatial_merge_size: int = self.config.spatial_merge_size
        self.spatial_merge_unit = self.spatial_merge_size**2

    @property
    def original(self) -> PreTrainedModel:
        """The tower that this one stands for."""
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
        **_: Any,  # noqa: ANN401  # options of the local tower
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
    """Put a `RemoteTower` in the place of the model's vision tower, and return it.

    The original is kept for `detach`, without moving it: to free device memory, move `.original` to the CPU.
    Raises ValueError when the model has no such tower, or the service holds another one, and what
    `client.model()` raises.
    """
    owner = _owner(model)
    original = owner.visual
    if isinstance(original, RemoteTower):
        raise ValueError("the model's vision tower is remote already; detach it first")
    if not {"hidden_states", "grid_thw"} <= signature(original.forward).parameters.keys():
        raise ValueError(f"{type(original).__name__} is not called with hidden_states and grid_thw; it has no stand-in")
    levels = _check(getattr(model.config, "model_type", ""), original.config, client.model())
    place: Any = model.get_input_embeddings().weight
    remote = RemoteTower(original, client, place.detach(), levels)
    owner.visual = remote
    return remote


def detach(model: PreTrainedModel) -> None:
    """Put the original tower back. Raises ValueError when none was replaced."""
    owner = _owner(model)
    remote = owner.visual
    if not isinstance(remote, RemoteTower):
        raise ValueError("the model's vision tower is its own; there is nothing to detach")
    owner.visual = remote.original


def _owner(model: PreTrainedModel) -> Any:  # noqa: ANN401  # nn.Module's attributes are untyped
    """The module that holds the tower as `visual`."""
    for candidate in (model, *(child for name, child in model.named_children() if name == "model")):
        if any(name == "visual" for name, _ in candidate.named_children()):
            return candidate
    raise ValueError(f"{type(model).__name__} holds no vision tower as `visual` or `model.visual`")


def _check(model_type: str, vision: Any, remote: Model) -> int:  # noqa: ANN401  # a config of any family
    """Whether the service holds the tower that the model expects; the number of its deepstack levels."""
    if remote.model_type != model_type:
        raise ValueError(
            f"the service holds {remote.model_id}, a {remote.model_type or 'nameless'} tower; "
            f"the model is a {model_type}"
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
        raise ValueError(f"the grids name {ends[-1]} patches, but {len(patches)} were given")
    return [
        Item(patches[start:end], grid, "video" if grid[0] > 1 else "image")
        for grid, (start, end) in zip(grids, pairwise(ends), strict=True)
    ]
