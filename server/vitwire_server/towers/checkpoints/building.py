"""Build one module of a tower from its configuration and its weights."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from vitwire_server.towers.configs import Config
from vitwire_server.towers.family import Module, Weights
from vitwire_server.towers.files import CheckpointError

BROKEN = (RuntimeError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError, AssertionError)
"""What transformers and torch raise over impossible numbers in a configuration."""


def build_module(
    folder: Path,
    name: str,
    module: Module,
    config: Config,
    weights: Weights,
    dtype: torch.dtype,
) -> nn.Module:
    """A module with its weights, on the host; `config` is the whole checkpoint's. Raises CheckpointError."""
    try:
        own = module.configuration(config)
        if other := _other_form(module, own, weights):
            raise CheckpointError(f"{folder}: the weights do not fit the vision {name}: {other}")
        make = _pretrained if issubclass(module.resolve(), PreTrainedModel) else _plain
        built, info = make(module, own, weights, dtype)
    except BROKEN as error:
        reason = str(error).partition("\n")[0]
        raise CheckpointError(f"{folder}: the vision {name} cannot be built: {reason}") from error
    wrong = {key: sorted(map(str, keys)) for key, keys in info.items() if keys}
    if wrong:
        listed = "; ".join(f"{key.replace('_', ' ')}: {', '.join(names[:3])}" for key, names in wrong.items())
        raise CheckpointError(f"{folder}: the weights do not fit the vision {name} ({listed})")
    return built.eval().requires_grad_(requires_grad=False)


def unfilled_module(module: Module, config: Config, dtype: torch.dtype) -> nn.Module:
    """As `build_module`, on the host, with undefined values, which take no memory until written."""
    with torch.device("meta"):
        built = module.make(module.configuration(config))
    for owner in built.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            empty = torch.empty_like(parameter, dtype=dtype, device="cpu")
            setattr(owner, name, nn.Parameter(empty, requires_grad=False))
        for name, buffer in owner.named_buffers(recurse=False):
            setattr(owner, name, torch.empty_like(buffer, device="cpu"))
    return built.eval()


def _other_form(module: Module, config: Config, weights: Weights) -> str | None:
    """The first weight of another shape or kind than the module holds, found before memory is allocated."""
    with torch.device("meta"):
        held = {name: tuple(tensor.shape) for name, tensor in module.make(config).named_parameters()}
    for name in sorted(held.keys() & weights.keys()):
        given = weights[name]
        if tuple(given.shape) != held[name]:
            return f"{name} is of shape {tuple(given.shape)}, and config.json asks for {held[name]}"
        if not given.is_floating_point():
            return f"{name} is of type {given.dtype}, but must be floating point"
    return None


def _pretrained(
    module: Module, config: Config, weights: Weights, dtype: torch.dtype
) -> tuple[nn.Module, dict[str, Any]]:
    source: Any = module.resolve()  # from_pretrained is typed in part only
    _, *others = module.called_with(config)
    model, info = source.from_pretrained(
        None, *others, config=config, state_dict=dict(weights), dtype=dtype, output_loading_info=True
    )
    return model, {key: info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")}


def _plain(module: Module, config: Config, weights: Weights, dtype: torch.dtype) -> tuple[nn.Module, dict[str, Any]]:
    """A module that is not a transformers model: its buffers stay in float32, as computed."""
    built = module.make(config)
    for parameter in built.parameters():
        parameter.data = parameter.data.to(dtype)
    info = built.load_state_dict(weights, strict=False)
    return built, {"missing_keys": info.missing_keys, "unexpected_keys": info.unexpected_keys}
