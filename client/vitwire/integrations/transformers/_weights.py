"""The modules of a model that the service replaces, and their weights."""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, NoReturn

import torch
from torch import nn
from transformers import PreTrainedModel

_TOWERS = (
    "visual",
    "vision_tower",
    "vision_model",
    "vision_encoder",
    "high_res_vision_model",
    "embed_tokens_extend.image_embed",
)
_PROJECTORS = (
    "projector",
    "multi_modal_projector",
    "mm_projector",
    "merger",
    "vision_adapter",
    "vision_projection",
    "aligner",
    "resampler_model",
    "embed_vision",
    "high_res_vision_neck",
    "high_res_vision_proj",
)

_ABSENT = (
    "this vision tower is in a Vitwire service. An attached model calls it in get_image_features and "
    "get_video_features; a model that was detached after attach(keep=False) has to be loaded again for images"
)


class RemoteTower(nn.Module):
    """Stands where the vision tower was; it has no weights, and only the attribute `config`."""

    def __init__(self, config: Any) -> None:  # noqa: ANN401  # a PreTrainedConfig of any tower
        super().__init__()
        self.config = config

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  # as of nn.Module
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            raise AttributeError(f"{error}: {_ABSENT}") from None

    def forward(self, *_: object, **__: object) -> NoReturn:
        """Raises RuntimeError."""
        raise RuntimeError(_ABSENT)


def has_tower(module: nn.Module) -> bool:
    """Whether the module has a vision tower where it is replaced."""
    return bool(_found(module, _TOWERS))


class Original:
    """The replaced modules of `owner`: its vision towers, and what their rows pass through.

    Their weights move to the host until `restore`, or are dropped unless they are to `keep`.
    """

    def __init__(self, owner: PreTrainedModel, *, keep: bool) -> None:
        self._owner = owner
        self._place = _place(owner)
        self._modules = _replaced(owner)
        self._devices = {name: tensor.device for name, tensor in self._tensors()}
        if not keep:
            self._modules.clear()
        for _, tensor in self._tensors():
            tensor.data = tensor.data.cpu()
        if any(device.type == "cuda" for device in self._devices.values()):
            torch.cuda.empty_cache()

    def restore(self) -> None:
        """Put the kept modules back where they were; if the model was moved or cast since, they follow."""
        (before, dtype), (now, new_dtype) = self._place, _place(self._owner)
        for name, tensor in self._tensors():
            device = self._devices[name]
            tensor.data = tensor.data.to(
                now if device == before else device, new_dtype if tensor.dtype == dtype else tensor.dtype
            )
        for name, child in self._modules.items():
            _put(self._owner, name, child)

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Weights and buffers by name; those that are offloaded stay with accelerate."""
        for prefix, child in self._modules.items():
            for name, tensor in chain(child.named_parameters(prefix), child.named_buffers(prefix)):
                if not tensor.is_meta:
                    yield name, tensor


def _replaced(owner: PreTrainedModel) -> dict[str, nn.Module]:
    """The modules by name, once others stand in their places."""
    modules = _found(owner, (*_TOWERS, *_PROJECTORS))
    for name, child in modules.items():
        # Llama 4 projects rows outside its feature method, so the projector must still be callable.
        _put(owner, name, RemoteTower(getattr(child, "config", None)) if name in _TOWERS else nn.Identity())
    return modules


def _found(module: nn.Module, paths: Sequence[str]) -> dict[str, nn.Module]:
    """The modules at those of the paths where there is one."""
    known = dict(module.named_modules()) if any("." in path for path in paths) else dict(module.named_children())
    return {path: known[path] for path in paths if path in known}


def _put(owner: nn.Module, path: str, child: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(owner.get_submodule(parent), name, child)


def _place(owner: PreTrainedModel) -> tuple[torch.device, torch.dtype]:
    """Device and dtype of the embedding layer, which move with the model."""
    weight: Any = owner.get_input_embeddings().weight
    return weight.device, weight.dtype
