"""Building one module of a tower of its configuration and its weights."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from vitwire_server.towers.family import Module, Weights
from vitwire_server.towers.files import CheckpointError

BROKEN = (RuntimeError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError)
"""What transformers and torch raise over numbers in a configuration that make no sense."""


def build_module(
    folder: Path,
    name: str,
    module: Module,
    config: Any,  # noqa: ANN401 - configurations are of many classes
    weights: Weights,
    dtype: torch.dtype,
) -> nn.Module:
    """A module with its weights, on the host; `config` is the whole checkpoint's. Raises CheckpointError."""
    try:
        source, own = module.resolve(), module.configuration(config)
        if other := _other_shape(source, own, weights):
            raise CheckpointError(f"{folder}: the weights do not fit the vision {name}: {other}")
        make = _pretrained if issubclass(source, PreTrainedModel) else _plain
        built, info = make(source, own, weights, dtype)
    except BROKEN as error:
        told = str(error).partition("\n")[0]
        raise CheckpointError(f"{folder}: no vision {name} can be built of it: {told}") from error
    wrong = {key: sorted(map(str, keys)) for key, keys in info.items() if keys}
    if wrong:
        told = "; ".join(f"{key.replace('_', ' ')}: {', '.join(names[:3])}" for key, names in wrong.items())
        raise CheckpointError(f"{folder}: the weights do not fit the vision {name} ({told})")
    return built.eval().requires_grad_(requires_grad=False)


def _other_shape(source: type[nn.Module], config: Any, weights: Weights) -> str | None:  # noqa: ANN401
    """The first weight of another shape than the configuration asks for, found before any memory is taken."""
    with torch.device("meta"):
        held = {name: tuple(tensor.shape) for name, tensor in source(config).named_parameters()}
    for name in sorted(held.keys() & weights.keys()):
        given = tuple(weights[name].shape)
        if given != held[name]:
            return f"{name} is of shape {given}, and config.json asks for {held[name]}"
    return None


def _pretrained(
    source: Any,  # noqa: ANN401 - from_pretrained is typed in part only
    config: Any,  # noqa: ANN401
    weights: Weights,
    dtype: torch.dtype,
) -> tuple[nn.Module, dict[str, Any]]:
    model, info = source.from_pretrained(
        None, config=config, state_dict=dict(weights), dtype=dtype, output_loading_info=True
    )
    return model, {key: info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")}


def _plain(
    source: type[nn.Module],
    config: Any,  # noqa: ANN401
    weights: Weights,
    dtype: torch.dtype,
) -> tuple[nn.Module, dict[str, Any]]:
    """A module that is no model of transformers: its buffers stay as they are computed, in float32."""
    module = source(config)
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)
    info = module.load_state_dict(weights, strict=False)
    return module, {"missing_keys": info.missing_keys, "unexpected_keys": info.unexpected_keys}
