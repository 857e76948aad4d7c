"""The weights of a vision tower, from shards in hub layout: safetensors, or else what torch.save wrote.

Only the shards that hold the tower's weights, by the index, are opened; those of the language model
may be absent from disk.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from transformers import PreTrainedModel

from vitwire_server.core.pooling import Pooling
from vitwire_server.towers.checkpoints.building import BROKEN
from vitwire_server.towers.checkpoints.shards import names_in, tensors_in
from vitwire_server.towers.configs import Config, surplus_layers
from vitwire_server.towers.family import Module, Weights
from vitwire_server.towers.files import CheckpointError, read_json

_LAYOUTS = (
    ("model.safetensors.index.json", "model.safetensors"),
    ("pytorch_model.bin.index.json", "pytorch_model.bin"),
)
"""Names of the index of shards and of the only file; the first that is there is read."""

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
    shards = _vision_shards(folder, _weight_map(_whole(folder, hub_id)), modules, config)
    if hub_id:
        download(hub_id, list(shards))
    weights: dict[str, Weights] = {module: {} for module in modules}
    for shard in track(list(shards), "loading", len(shards)):
        path = folder / shard
        if not path.is_file():
            raise CheckpointError(f"{folder}: {shard} is missing, and it holds weights of the vision tower")
        tensors = tensors_in(path, {key for _, _, key in shards[shard]})
        for module, name, key in shards[shard]:
            before = weights[module].setdefault(name, tensors[key])
            if before is not tensors[key] and not torch.equal(before, tensors[key]):
                raise CheckpointError(f"{path}: {key} differs from another weight that stands for {name} too")
    return {name: _converted(folder, name, module, config, weights[name]) for name, module in modules.items()}


def _converted(folder: Path, name: str, module: Module, config: Config, weights: Weights) -> Weights:
    """Weights as the module holds them. Raises CheckpointError."""
    try:
        return module.convert(weights, module.configuration(config))
    except BROKEN as error:
        raise CheckpointError(f"{folder}: the weights do not fit the vision {name}: {error}") from error


def _vision_shards(
    folder: Path, keys: Mapping[str, str], modules: Mapping[str, Module], config: Config
) -> dict[str, list[tuple[str, str, str]]]:
    """For each shard with vision weights, of weights to shards: module, name within it, and name in the shard."""
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


def _whole(folder: Path, hub_id: str | None) -> Path:
    """The index of a checkpoint's shards, or its only file, which is fetched from the hub. Raises CheckpointError."""
    for index, single in _LAYOUTS:
        if (folder / index).is_file():
            return folder / index
        if hub_id:
            download(hub_id, [single])
        if (folder / single).is_file():
            return folder / single
    raise CheckpointError(f"{folder} holds no weights: none of {', '.join(name for pair in _LAYOUTS for name in pair)}")


def _weight_map(path: Path) -> Mapping[str, str]:
    """Weight name to shard, from an index or from the only file. Raises CheckpointError."""
    if path.suffix != ".json":
        return dict.fromkeys(names_in(path), path.name)
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise CheckpointError(f"{path} holds no weight_map from names to files")
    for key, shard in weight_map.items():
        if Path(shard).is_absolute() or ".." in Path(shard).parts:
            raise CheckpointError(f"{path}: {key} is in {shard}, which must be a file of this directory")
    return weight_map


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
