"""Loading only the vision tower of a checkpoint in hub layout.

The index tells which shards hold the tower's weights; only those are opened, so the shards of the
language model may be absent from disk.
"""

import hashlib
import importlib
import json
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
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from vitwire_server.towers.families import FAMILIES, Family
from vitwire_server.towers.packed import PackedTower

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

Track = Callable[[Iterable[str], str, int], Iterable[str]]
"""Wraps an iterable in a progress bar: items, description, how many."""


class CheckpointError(Exception):
    """The checkpoint cannot be served; the message is one sentence for the operator."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint on disk whose configuration was read and whose family is in the table."""

    model_id: str
    folder: Path
    on_hub: bool
    """True if `folder` is the hub's cache, where shards are fetched as they are needed."""
    family: Family
    vision_config: Any
    dtype: torch.dtype
    """What the checkpoint says it was saved in."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A tower on its device, and the SHA-256 over its weights."""

    tower: PackedTower
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
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        vision_config = config.vision_config
        dtype = config.dtype or vision_config.dtype or torch.float32
    except (ValueError, OSError, TypeError, AttributeError, KeyError, StrictDataclassError) as error:
        raise CheckpointError(f"{folder / 'config.json'} is not a {family.title} configuration: {error}") from error
    if dtype not in _DTYPES:
        raise CheckpointError(f"{model}: weights in {dtype} are not supported")
    model_id = model if on_hub else folder.resolve().name
    return Checkpoint(model_id, folder, on_hub, family, vision_config, dtype)


def load_tower(checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device, track: Track) -> Loaded:
    """Read the tower's weights and build it. Raises CheckpointError.

    The tower is built in `dtype` rather than cast to it: casting a built module would round its
    rotary frequencies too.
    """
    weights = _read_weights(checkpoint, track)
    transformers.utils.logging.disable_progress_bar()
    tower_class: Any = _tower_class(checkpoint.family)
    try:
        model, info = tower_class.from_pretrained(
            None, config=checkpoint.vision_config, state_dict=dict(weights), dtype=dtype, output_loading_info=True
        )
    except (RuntimeError, ValueError, TypeError, AttributeError, LookupError, ZeroDivisionError) as error:
        told = str(error).partition("\n")[0]
        raise CheckpointError(f"{checkpoint.folder}: no vision tower can be built of it: {told}") from error
    wrong = {
        key: sorted(map(str, info[key])) for key in ("missing_keys", "unexpected_keys", "mismatched_keys") if info[key]
    }
    if wrong:
        told = "; ".join(f"{key.replace('_', ' ')}: {', '.join(names[:3])}" for key, names in wrong.items())
        raise CheckpointError(f"{checkpoint.folder}: the weights do not fit the vision tower ({told})")
    model.eval().requires_grad_(requires_grad=False).to(device)
    return Loaded(PackedTower(checkpoint.family, model), _fingerprint(weights))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises CheckpointError if there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} holds no {path.name}: is it a model directory in hub layout?") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return content


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


def _tower_class(family: Family) -> type[PreTrainedModel]:
    module, name = family.tower.split(":")
    tower: type[PreTrainedModel] = getattr(importlib.import_module(f"transformers.models.{module}"), name)
    return tower


def _read_weights(checkpoint: Checkpoint, track: Track) -> Mapping[str, Tensor]:
    """The tower's weights by their names within the tower."""
    shards = _vision_shards(checkpoint)
    if checkpoint.on_hub:
        _download(checkpoint.model_id, list(shards))
    weights: dict[str, Tensor] = {}
    for shard in track(list(shards), "loading", len(shards)):
        path = checkpoint.folder / shard
        if not path.exists():
            raise CheckpointError(f"{checkpoint.folder}: {shard} is missing, and it holds weights of the vision tower")
        try:
            with safe_open(path, framework="pt") as tensors:
                weights |= {name: tensors.get_tensor(key) for name, key in shards[shard].items()}
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} is no safetensors file of this checkpoint: {error}") from error
    return weights


def _vision_shards(checkpoint: Checkpoint) -> dict[str, dict[str, str]]:
    """For each shard with vision weights: name within the tower to name in the shard."""
    prefixes = checkpoint.family.prefixes
    if checkpoint.on_hub and not (checkpoint.folder / _INDEX).exists():
        _download(checkpoint.model_id, [_SINGLE])
    keys = _weight_map(checkpoint.folder)
    prefix = next((p for p in prefixes if any(key.startswith(p) for key in keys)), None)
    if prefix is None:
        raise CheckpointError(f"{checkpoint.folder} holds no vision tower: no weight is named {' or '.join(prefixes)}*")
    shards: dict[str, dict[str, str]] = {}
    for key, shard in keys.items():
        if key.startswith(prefix):
            shards.setdefault(shard, {})[key.removeprefix(prefix)] = key
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


def _fingerprint(weights: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
