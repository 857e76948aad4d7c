"""Loading only the vision tower of a checkpoint in hub layout.

The index tells which shards hold the tower's weights; only those are opened, so the shards of the
language model may be absent from disk.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import snapshot_download
from huggingface_hub.errors import StrictDataclassError
from packaging.version import Version
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

from vitwire_server.core.items import Modality
from vitwire_server.core.models import Preprocessing
from vitwire_server.towers.checkpoints.building import BROKEN, build_module
from vitwire_server.towers.checkpoints.lora import Adapter
from vitwire_server.towers.families import FAMILIES
from vitwire_server.towers.family import Family, Module, Weights
from vitwire_server.towers.files import CheckpointError, read_json
from vitwire_server.towers.served import absurd_layers, surplus_layers
from vitwire_server.towers.tower import Tower

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

Track = Callable[[Iterable[str], str, int], Iterable[str]]
"""Wraps an iterable in a progress bar: items, description, how many."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint on disk whose configuration was read and whose family is in the table."""

    model_id: str
    folder: Path
    on_hub: bool
    """True if `folder` is the hub's cache, where shards are fetched as they are needed."""
    family: Family
    config: Any
    """The whole checkpoint's configuration."""
    dtype: torch.dtype
    """What the checkpoint says it was saved in."""

    def preprocessing(self) -> dict[Modality, Preprocessing]:
        """Settings of its processor for each modality it takes. Raises CheckpointError."""
        return self.family.preprocessing(self.folder, self.config)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A tower on its device, and the SHA-256 over its weights."""

    tower: Tower
    fingerprint: str


def open_checkpoint(model: str) -> Checkpoint:
    """Find a directory or a hub id and read its configuration.

    Of a hub id, only the configuration is fetched here. Raises CheckpointError.
    """
    folder, on_hub = _folder(model)
    settings = read_json(folder / "config.json")
    model_type = settings.get("model_type")
    family = FAMILIES.get(str(model_type))
    if family is None:
        known = ", ".join(FAMILIES)
        raise CheckpointError(f"{model}: model_type {model_type!r} is not supported; supported are {known}")
    if Version(transformers.__version__) < Version(family.transformers):
        raise CheckpointError(
            f"{model}: {family.title} needs transformers {family.transformers} or newer, "
            f"{transformers.__version__} is installed"
        )
    config = _read_config(folder, settings, family)
    dtype = config.dtype or family.tower.configuration(config).dtype or torch.float32
    if dtype not in _DTYPES:
        raise CheckpointError(f"{model}: weights in {dtype} are not supported")
    model_id = model if on_hub else folder.resolve().name
    return Checkpoint(model_id, folder, on_hub, family, config, dtype)


def load_tower(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device,
    track: Track,
    adapter: Adapter | None = None,
) -> Loaded:
    """Read the tower's weights, merge an adapter into them, and build it. Raises CheckpointError.

    The tower is built in `dtype` rather than cast to it: casting a built module would round its
    rotary frequencies too.
    """
    weights = _read_weights(checkpoint, track)
    if adapter:
        adapter.merge(checkpoint.family, checkpoint.config, weights)
    transformers.utils.logging.disable_progress_bar()
    parts = {
        name: build_module(checkpoint.folder, name, module, checkpoint.config, weights[name], dtype)
        for name, module in checkpoint.family.modules.items()
    }
    for part in parts.values():
        part.to(device)
    try:
        tower = checkpoint.family.build(parts, checkpoint.config)
    except BROKEN as error:
        raise CheckpointError(f"{checkpoint.folder}: no vision tower can be built of it: {error}") from error
    tower.rewrite()
    return Loaded(tower, _fingerprint(weights))


def _read_config(folder: Path, settings: Mapping[str, Any], family: Family) -> Any:  # noqa: ANN401 - of many classes
    """The configuration of a checkpoint that is served. Raises CheckpointError."""
    if absurd := absurd_layers(settings):
        raise CheckpointError(f"{folder / 'config.json'}: {absurd}")
    try:
        config = family.read_config(folder, settings)
        problem = next(filter(None, (module.problem(config) for module in family.modules.values())), None)
    except (*BROKEN, OSError, StrictDataclassError) as error:
        told = " ".join(str(error).split())
        raise CheckpointError(f"{folder / 'config.json'} is not a {family.title} configuration: {told}") from error
    if problem:
        raise CheckpointError(f"{folder / 'config.json'}: this {family.title} is not served: {problem}")
    return config


def _folder(model: str) -> tuple[Path, bool]:
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder, False
    if folder.exists() or folder.is_absolute() or model.count("/") != 1 or model.startswith("."):
        raise CheckpointError(f"{model} is neither a directory nor a hub id of the form owner/name")
    return _download(model, ["*.json"]), True


def _download(model: str, patterns: list[str]) -> Path:
    try:
        return Path(snapshot_download(model, allow_patterns=patterns))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{model} is no directory here and could not be fetched from the hub: {error}") from error


def _read_weights(checkpoint: Checkpoint, track: Track) -> dict[str, Weights]:
    """The weights of each module of the family, by their names within it."""
    shards = _vision_shards(checkpoint)
    if checkpoint.on_hub:
        _download(checkpoint.model_id, list(shards))
    modules = checkpoint.family.modules
    weights: dict[str, Weights] = {module: {} for module in modules}
    for shard in track(list(shards), "loading", len(shards)):
        path = checkpoint.folder / shard
        if not path.exists():
            raise CheckpointError(f"{checkpoint.folder}: {shard} is missing, and it holds weights of the vision tower")
        try:
            with safe_open(path, framework="pt") as tensors:
                for module, name, key in shards[shard]:
                    weights[module][name] = _floating(tensors.get_tensor(key), key, path)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} is no safetensors file of this checkpoint: {error}") from error
    return {name: _converted(checkpoint, name, module, weights[name]) for name, module in modules.items()}


def _floating(tensor: torch.Tensor, key: str, path: Path) -> torch.Tensor:
    """The tensor, unless its values are codes of a quantisation. Raises CheckpointError."""
    if tensor.element_size() == 1:
        raise CheckpointError(f"{path}: {key} is quantised ({tensor.dtype}); towers are served in 16 or 32 bits only")
    return tensor


def _converted(checkpoint: Checkpoint, name: str, module: Module, weights: Weights) -> Weights:
    """Weights as the module holds them. Raises CheckpointError."""
    try:
        return module.convert(weights, module.configuration(checkpoint.config))
    except BROKEN as error:
        raise CheckpointError(f"{checkpoint.folder}: the weights do not fit the vision {name}: {error}") from error


def _vision_shards(checkpoint: Checkpoint) -> dict[str, list[tuple[str, str, str]]]:
    """For each shard with vision weights: module, name within the module, and name in the shard."""
    if checkpoint.on_hub and not (checkpoint.folder / _INDEX).exists():
        _download(checkpoint.model_id, [_SINGLE])
    keys = _weight_map(checkpoint.folder)
    shards: dict[str, list[tuple[str, str, str]]] = {}
    for name, module in checkpoint.family.modules.items():
        named = {key: found for key in keys if (found := module.name(key)) is not None}
        if not named:
            told = " or ".join(f"{prefix}*" for prefix in module.prefixes)
            raise CheckpointError(f"{checkpoint.folder} holds no vision {name}: no weight is named {told}")
        if issubclass(module.resolve(), PreTrainedModel):
            problem = surplus_layers(module.configuration(checkpoint.config), named.values())
            if problem:
                raise CheckpointError(f"{checkpoint.folder / 'config.json'}: {module.named(problem)}")
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
        raise CheckpointError(f"{folder / _SINGLE} is no safetensors file: {error}") from error


def _fingerprint(weights: Mapping[str, Weights]) -> str:
    """SHA-256 over all weights; names of a module beside the tower begin with the module's."""
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
    return digest.hexdigest()
