"""Replace a model's vision tower by a service, and back."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import update_wrapper
from inspect import signature
from typing import Any, cast

import transformers
from packaging.version import Version
from torch import nn
from transformers import PreTrainedModel

from vitwire.aio import AsyncClient
from vitwire.client import Client
from vitwire.integrations.transformers._features import Encoder, RemoteFeatures
from vitwire.integrations.transformers._layout import Layout
from vitwire.integrations.transformers._layouts import LAYOUTS, tower_type
from vitwire.integrations.transformers._weights import Original, has_tower
from vitwire.items import Modality
from vitwire.model import Model

_ATTACHED = "_vitwire"
"""Attribute of an attached module that holds its `_Attached`."""
OLDEST = Version("5.18")
"""Earlier models expect deepstack rows of all images in one tensor, and do not let `generate` encode them."""
_METHODS: Mapping[str, Modality] = {"get_image_features": "image", "get_video_features": "video"}


@dataclass(frozen=True, slots=True)
class _Attached:
    """What `detach` needs."""

    original: Original
    methods: Mapping[str, object]
    """What the module itself, rather than its class, had under the names of the replaced methods; None if nothing."""
    client: Client | None
    """The client, if `attach` made it."""


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
    put = _module_replacer(owner, layout, encoder, described) if layout.replaces else None
    setattr(owner, _ATTACHED, _Attached(Original(owner, keep=keep), methods, own))
    if put:
        put()


def detach(model: nn.Module) -> None:
    """Restore the model as it was before `attach`, and close the client if `attach` made it.

    A model that was attached with `keep=False` takes text only, until it is attached again.
    Raises ValueError if the model is not attached.
    """
    owner = _owner(model)
    attached: _Attached | None = vars(owner).get(_ATTACHED)
    if attached is None:
        raise ValueError("the model's vision tower is not remote; there is nothing to detach")
    delattr(owner, _ATTACHED)
    if replaced := _layout(owner).replaces:
        del owner.get_submodule(replaced).forward
    for name, before in attached.methods.items():
        delattr(owner, name)
        if before is not None:
            setattr(owner, name, before)
    attached.original.restore()
    if attached.client:
        attached.client.close()


def _module_replacer(owner: PreTrainedModel, layout: Layout, encoder: Encoder, described: Model) -> Callable[[], None]:
    """Called once the tower was taken out: what stands in its place then calls the service."""
    before: Any = owner.get_submodule(layout.replaces)
    remote = RemoteFeatures(owner, signature(before.forward), "image", layout, encoder, described)
    attributes = {name: getattr(before, name) for name in layout.attributes}

    def put() -> None:
        module: Any = owner.get_submodule(layout.replaces)
        module.forward = remote
        for name, value in attributes.items():
            setattr(module, name, value)

    return put


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
