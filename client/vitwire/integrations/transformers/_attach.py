"""Replace a model's vision tower by a service, and back."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import update_wrapper
from inspect import signature
from itertools import chain
from typing import Any, NoReturn, cast

import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from vitwire.aio import AsyncClient
from vitwire.client import Client
from vitwire.integrations.transformers._features import Encoder, Layout, RemoteFeatures
from vitwire.integrations.transformers._layouts import LAYOUTS, tower_type
from vitwire.items import Modality
from vitwire.model import Model

_ATTACHED = "_vitwire"
"""Attribute of an attached module that holds its `_Original`."""
OLDEST = Version("5.18")
"""Earlier models expect deepstack rows of all images in one tensor, and do not let `generate` encode them."""
_METHODS: Mapping[str, Modality] = {"get_image_features": "image", "get_video_features": "video"}
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


def attach(
    model: nn.Module, client: Encoder | str, *, keep: bool = True, weights_fingerprint: str | None = None
) -> None:
    """Replace the model's vision tower and projector by a service, in place.

    client: a `vitwire.Client`, or the target of one that `detach` closes.
    keep: move the weights to the host, for `detach`. False drops them.
    weights_fingerprint: the one that `Client.model()` must report.

    Raises ValueError if the model has no tower that can be replaced or the service has another one, RuntimeError for
    a transformers that is too old, and the errors of `Client.model()`; the model is unchanged then.
    """
    if Version(transformers.__version__) < OLDEST:
        raise RuntimeError(f"attach needs transformers {OLDEST} or newer, {transformers.__version__} is installed")
    owner = _owner(model)
    if _ATTACHED in vars(owner):
        raise ValueError("the model's vision tower is already remote; detach it first")
    layout = _layout(owner)
    if isinstance(client, AsyncClient):
        raise TypeError("attach needs a vitwire.Client, got an AsyncClient")
    with ExitStack() as opened:
        own = opened.enter_context(Client(client)) if isinstance(client, str) else None
        encoder: Encoder = own or cast("Encoder", client)
        described = encoder.model()
        _check(owner, described, weights_fingerprint)
        opened.pop_all()
    methods = {name: vars(owner).get(name) for name in _METHODS if hasattr(owner, name)}
    for name in methods:
        original = getattr(owner, name)
        remote = RemoteFeatures(owner, signature(original), _METHODS[name], layout, encoder, described)
        setattr(owner, name, update_wrapper(remote, original))  # `generate` passes the arguments in the signature
    attributes = {}
    if layout.replaces:
        before: Any = owner.get_submodule(layout.replaces)
        remote = RemoteFeatures(owner, signature(before.forward), "image", layout, encoder, described)
        attributes = {"forward": remote} | {name: getattr(before, name) for name in layout.attributes}
    setattr(owner, _ATTACHED, _Original(owner, methods, own, keep=keep))
    for name, value in attributes.items():
        setattr(owner.get_submodule(layout.replaces), name, value)


def detach(model: nn.Module) -> None:
    """Restore the model as it was before `attach`, and close the client if `attach` made it.

    A model that was attached with `keep=False` takes text only, until it is attached again.
    Raises ValueError if the model is not attached.
    """
    owner = _owner(model)
    original: _Original | None = vars(owner).get(_ATTACHED)
    if original is None:
        raise ValueError("the model's vision tower is not remote; there is nothing to detach")
    delattr(owner, _ATTACHED)
    if replaced := _layout(owner).replaces:
        del owner.get_submodule(replaced).forward
    for name, before in original.methods.items():
        delattr(owner, name)
        if before is not None:
            setattr(owner, name, before)
    original.restore()
    if original.client:
        original.client.close()


def _owner(model: nn.Module) -> PreTrainedModel:
    """The module that has the tower as a child, and the methods that call it."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and has_tower(module):
            known = LAYOUTS.get(tower_type(module.config.model_type))
            if hasattr(module, "get_image_features") or (known and known.replaces):
                return module
    raise ValueError(f"{type(model).__name__} has no vision tower that can be replaced")


def _layout(owner: PreTrainedModel) -> Layout:
    model_type = owner.config.model_type
    if tower_type(model_type) not in LAYOUTS:
        raise ValueError(f"a {model_type} cannot be attached; models that can: {', '.join(LAYOUTS)}")
    return LAYOUTS[tower_type(model_type)]


def _check(owner: PreTrainedModel, remote: Model, fingerprint: str | None) -> None:
    """Raises ValueError if the service has another tower than the model."""
    model_type = owner.config.model_type
    if tower_type(remote.model_type) != tower_type(model_type):
        raise ValueError(
            f"the service has {remote.model_id}, a {remote.model_type or 'nameless'} tower; the model is a {model_type}"
        )
    vision: Any = owner.config.vision_config
    levels = len(getattr(vision, "deepstack_visual_indexes", None) or ())
    weight: Any = owner.get_input_embeddings().weight
    width = weight.shape[-1] * (1 + levels)
    if (remote.deepstack_levels, remote.embedding_width) != (levels, width):
        raise ValueError(
            f"the service's embeddings are {remote.embedding_width} wide with {remote.deepstack_levels} "
            f"deepstack levels, the model expects {width} with {levels}"
        )
    if fingerprint is not None and remote.weights_fingerprint != fingerprint:
        raise ValueError(
            f"the service's weights have the fingerprint {remote.weights_fingerprint or 'unknown'}, not {fingerprint}"
        )


class RemoteTower(nn.Module):
    """Stands where the vision tower was; it has no weights, and only the attribute `config`."""

    def __init__(self, config: PreTrainedConfig | None) -> None:
        super().__init__()
        self.config = config

    def __getattr__(self, name: str) -> Tensor | nn.Module:
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


class _Original:
    """The replaced modules of `owner`: its vision towers, and what their rows pass through.

    Their weights move to the host until `restore`, or are dropped unless they are to `keep`.
    """

    def __init__(
        self, owner: PreTrainedModel, methods: Mapping[str, object], client: Client | None, *, keep: bool
    ) -> None:
        self.methods = methods
        """Attributes that the owner itself, rather than its class, had under the methods' names; None if none."""
        self.client = client
        """The client, if `attach` made it."""
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
    """The modules at the paths that exist."""
    known = dict(module.named_modules()) if any("." in path for path in paths) else dict(module.named_children())
    return {path: known[path] for path in paths if path in known}


def _put(owner: nn.Module, path: str, child: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(owner.get_submodule(parent), name, child)


def _place(owner: PreTrainedModel) -> tuple[torch.device, torch.dtype]:
    """Device and dtype of the embedding layer, which move with the model."""
    weight: Any = owner.get_input_embeddings().weight
    return weight.device, weight.dtype
