"""The weights of a vision tower, from safetensors shards in hub layout.

Only the shards that hold the tower's weights, by the index, are opened; those of the language model
may be absent from disk.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

from vitwire_server.core.pooling import Pooling
from vitwire_server.towers.checkpoints.building import BROKEN
from vitwire_server.towers.configs import Config
from vitwire_server.towers.family import Module, Weights
from vitwire_server.towers.files import CheckpointError, read_json
from vitwire_server.towers.served import surplus_layers

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"

Track = Callable[[Iterable[str], str, int], Iterable[str]]
"""Wraps an iterable in a progress bar: items, description, how many."""


def download(model: str, patterns: list[str]) -> Path:
    """Fetch a model's files of these patterns from the hub, to its cache. Raises CheckpointError."""
    try:
        return Path(snapshot_download(model, allow_patterns=patterns))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{model} is not a local directory and could not be fetched from the hub: {error}"
        ) from error


def read_weights(
    folder: Path, hub_id: str | None, modules: Mapping[str, Module], config: Config, track: Track
) -> dict[str, Weights]:
    """The weights of each module, by their names within it; `config` is the whole checkpoint's. Raises CheckpointError.

    With `hub_id`, `folder` is the hub's cache, where shards are fetched as they are needed.
    """
    if hub_id and not (folder / _INDEX).exists():
        download(hub_id, [_SINGLE])
    shards = _vision_shards(folder, modules, config)
    if hub_id:
        download(hub_id, list(shards))
    weights: dict[str, Weights] = {module: {} for module in modules}
    for shard in track(list(shards), "loading", len(shards)):
        path = folder / shard
        if not path.exists():
            raise CheckpointError(f"{folder}: {shard} is missing, and it holds weights of the vision tower")
        try:
            with safe_open(path, framework="pt") as tensors:
                for module, name, key in shards[shard]:
                    weights[module][name] = _floating(tensors.get_tensor(key), key, path)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} is not a safetensors file of this checkpoint: {error}") from error
    return {name: _converted(folder, name, module, config, weights[name]) for name, module in modules.items()}


def _floating(tensor: torch.Tensor, key: str, path: Path) -> torch.Tensor:
    """The tensor, unless its values are codes of a quantisation. Raises CheckpointError."""
    if tensor.element_size() == 1:
        raise CheckpointError(f"{path}: {key} is quantised ({tensor.dtype}); towers are served in 16 or 32 bits only")
    return tensor


def _converted(folder: Path, name: str, module: Module, config: Config, weights: Weights) -> Weights:
    """Weights as the module holds them. Raises CheckpointError."""
    try:
        return module.convert(weights, module.configuration(config))
    except BROKEN as error:
        raise CheckpointError(f"{folder}: the weights do not fit the vision {name}: {error}") from error


def _vision_shards(
    folder: Path, modules: Mapping[str, Module], config: Config
) -> dict[str, list[tuple[str, str, str]]]:
    """For each shard with vision weights: module, name within the module, and name in the shard."""
    keys = _weight_map(folder)
    shards: dict[str, list[tuple[str, str, str]]] = {}
    for name, module in modules.items():
        named = {key: found for key in keys if (found := module.name(key)) is not None}
        if not named:
            expected = " or ".join(f"{prefix}*" for prefix in module.prefixes)
            raise CheckpointError(f"{folder} holds no vision {name}: no weight is named {expected}")
        if issubclass(module.resolve(), PreTrainedModel):
            problem = surplus_layers(module.configuration(config), named.values())
            if problem:
                raise CheckpointError(f"{folder / 'config.json'}: {module.named(problem)}")
        for key, found in named.items():
            shards.setdefault(keys[key], []).append((name, found, key))
    return shards


def _weight_map(folder: Path) -> Mapping[str, str]:
    """Weight name to shard, from the index or from the only file."""
    if (folder / _INDEX).exists():
        weight_map = read_json(folder / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
            raise CheckpointError(f"{folder / _INDEX} holds no weight_map from names to files")
        return weight_map
    if not (folder / _SINGLE).exists():
        raise CheckpointError(f"{folder} holds neither {_INDEX} nor {_SINGLE}")
    try:
        with safe_open(folder / _SINGLE, framework="pt") as tensors:
            return dict.fromkeys(tensors.keys(), _SINGLE)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{folder / _SINGLE} is not a safetensors file: {error}") from error


def fingerprint(weights: Mapping[str, Weights], pooling: Pooling) -> str:
    """SHA-256 over all weights and the pooling; names of a module beside the tower begin with the module's."""
    named = {
        name if module == "tower" else f"{module}.{name}": tensor
        for module, own in weights.items()
        for name, tensor in own.items()
    }
    digest = hashlib.sha256()
    for name in sorted(named):
        tensor = named[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    if pooling is not Pooling.NONE:
        digest.update(f"pooling {pooling}".encode())
    return digest.hexdigest()
