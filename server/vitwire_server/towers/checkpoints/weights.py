"""The weights of a vision tower, from shards in hub layout: safetensors, or else what torch.save wrote.

Only the shards that hold the tower's weights, by the index, are opened; those of the language model may be absent from
disk. Of what torch.save wrote, nothing but tensors is read.
"""

import hashlib
import struct
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from zipfile import is_zipfile

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel

from vitwire_server.core.pooling import Pooling
from vitwire_server.towers.checkpoints import stored_float8
from vitwire_server.towers.configs import Config, surplus_layers
from vitwire_server.towers.family import Module, Weights
from vitwire_server.towers.files import CheckpointError, read_json

BROKEN = (RuntimeError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError, AssertionError)
"""Errors of transformers and torch over impossible numbers in a configuration."""
_LAYOUTS = (
    ("model.safetensors.index.json", "model.safetensors"),
    ("pytorch_model.bin.index.json", "pytorch_model.bin"),
)
"""Names of the index of shards and of the only file; the first that is there is read."""
_SAFETENSORS = ".safetensors"
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_WHOLE_BYTES = 4 << 30
"""Largest file of the format before torch 1.6, which cannot be mapped and is read as a whole."""

Fetch = Callable[[list[str]], object]
"""Brings files of these names into the folder, as far as the hub has them. Raises CheckpointError."""


@contextmanager
def refused(problem: str, *errors: type[Exception]) -> Iterator[None]:
    """Raises CheckpointError with these words and the reason over these errors."""
    try:
        yield
    except errors as error:
        raise CheckpointError(f"{problem}: {error}") from error


def download(model: str, patterns: list[str]) -> Path:
    """Fetch a model's files of these patterns from the hub, to its cache. Raises CheckpointError."""
    with refused(f"{model} is not a local directory and could not be fetched from the hub", OSError, ValueError):
        return Path(snapshot_download(model, allow_patterns=patterns))


def vision_shards(
    folder: Path, modules: Mapping[str, Module], config: Config, fetch: Fetch | None
) -> dict[str, list[tuple[str, str, str]]]:
    """The shards with vision weights, fetched; of each weight: module, name within it, name in the shard.

    `config` is the whole checkpoint's. Without `fetch`, shards may be missing. Raises CheckpointError.
    """
    shards = _shards(folder, _weight_map(_whole(folder, fetch)), modules, config)
    if fetch:
        fetch(list(shards))
    return shards


def read_weights(
    folder: Path, modules: Mapping[str, Module], config: Config, fetch: Fetch | None = None
) -> dict[str, Weights]:
    """The weights of each module, by their names within it; `config` is the whole checkpoint's. Raises CheckpointError.

    Those stored in float8 become float32. `fetch` brings shards into the folder that are not there yet.
    """
    shards = vision_shards(folder, modules, config, fetch)
    weights: dict[str, Weights] = {module: {} for module in modules}
    for shard in shards:
        path = folder / shard
        if not path.is_file():
            raise CheckpointError(f"{folder}: {shard} is missing, and it holds weights of the vision tower")
        tensors = _tensors_in(path, {key for _, _, key in shards[shard]})
        for part, name, key in shards[shard]:
            before = weights[part].setdefault(name, tensors[key])
            if before is not tensors[key] and not torch.equal(before, tensors[key]):
                raise CheckpointError(f"{path}: {key} differs from another weight that also maps to {name}")
    for name, module in modules.items():
        with refused(f"{folder}: the weights do not fit the vision {name}", *BROKEN):
            exact = stored_float8.dequantised(weights[name])
            weights[name] = module.convert(exact, module.configuration(config))
    return weights


def _shards(
    folder: Path, keys: Mapping[str, str], modules: Mapping[str, Module], config: Config
) -> dict[str, list[tuple[str, str, str]]]:
    shards: dict[str, list[tuple[str, str, str]]] = {}
    for name, module in modules.items():
        named = {key: found for key in keys if (found := stored_float8.name_in(module, key, keys)) is not None}
        if not named:
            expected = " or ".join(f"{prefix}*" for prefix in module.prefixes)
            raise CheckpointError(f"{folder} holds no vision {name}: no weight is named {expected}")
        layered = issubclass(module.resolve(), PreTrainedModel)
        if layered and (problem := surplus_layers(module.configuration(config), named.values())):
            raise CheckpointError(f"{folder / 'config.json'}: {module.named(problem)}")
        for key, found in named.items():
            shards.setdefault(keys[key], []).append((name, found, key))
    return shards


def _whole(folder: Path, fetch: Fetch | None) -> Path:
    """The index of a checkpoint's shards, or its only file, which is fetched. Raises CheckpointError."""
    for index, single in _LAYOUTS:
        if (folder / index).is_file():
            return folder / index
        if fetch:
            fetch([single])
        if (folder / single).is_file():
            return folder / single
    raise CheckpointError(f"{folder} holds no weights: none of {', '.join(name for pair in _LAYOUTS for name in pair)}")


def _weight_map(path: Path) -> Mapping[str, str]:
    """Weight name to shard, from an index or from the only file. Raises CheckpointError."""
    if path.suffix != ".json":
        return dict.fromkeys(_names_in(path), path.name)
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise CheckpointError(f"{path} holds no weight_map from names to files")
    for key, shard in weight_map.items():
        if Path(shard).is_absolute() or ".." in Path(shard).parts:
            raise CheckpointError(f"{path}: {key} is in {shard}, which must be a file of this directory")
    return weight_map


def _names_in(path: Path) -> list[str]:
    if path.suffix != _SAFETENSORS:
        return list(_unpickled(path))
    with _safetensors(path) as tensors:
        return list(tensors.keys())


def _tensors_in(path: Path, names: Collection[str]) -> dict[str, Tensor]:
    """These weights of a file, on the host, contiguous. Raises CheckpointError."""
    if path.suffix == _SAFETENSORS:
        with _safetensors(path) as tensors:
            stored = {name: tensors.get_tensor(name) for name in names}
    else:
        held = _unpickled(path)
        if absent := [name for name in names if name not in held]:
            raise CheckpointError(f"{path} does not contain tensor {absent[0]}")
        stored = {name: held[name] for name in names}
    return {name: _usable(tensor, name, path) for name, tensor in stored.items()}


@contextmanager
def _safetensors(path: Path) -> Iterator[Any]:
    problem = f"{path} is not a safetensors file of this checkpoint, or is not complete: download it again"
    with suppress(OSError), path.open("rb") as file:
        if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
            raise CheckpointError(f"{path} is a pointer of Git LFS, not the weights: run `git lfs pull` there")
    with refused(problem, SafetensorError, OSError), safe_open(path, framework="pt") as tensors:
        yield tensors


def _unpickled(path: Path) -> dict[str, Any]:
    """The state dict that torch.save wrote, mapped into memory. Runs no code of the file. Raises CheckpointError."""
    try:
        mapped = is_zipfile(path)
        if not mapped and path.stat().st_size > _WHOLE_BYTES:
            raise CheckpointError(
                f"{path} is in the format of torch before 1.6, which cannot be read in parts: convert it by "
                "torch.save(torch.load(path, weights_only=True), path)"
            )
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except UnpicklingError as error:
        raise CheckpointError(
            f"{path} holds more than tensors, or is damaged; it was not run: {_reason(error)}"
        ) from error
    except (*BROKEN, OSError, EOFError, struct.error) as error:
        raise CheckpointError(f"{path} is not a whole file of torch.save: {_reason(error)}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} must hold tensors by name, but holds a {type(found).__name__}")
    return {name: value for name, value in found.items() if isinstance(name, str)}


def _reason(error: Exception) -> str:
    """The line that says what was found: torch adds advice, such as to run the file's code."""
    lines = [line.partition("WeightsUnpickler error: ") for line in str(error).splitlines()]
    said = next((after for _, _, after in lines if after), None)
    return said or next((line for line, _, _ in lines if "GLOBAL" in line), lines[0][0] if lines else "it is empty")


def _usable(tensor: object, name: str, path: Path) -> Tensor:
    """A weight that a tower can compute with. Raises CheckpointError."""
    if not isinstance(tensor, Tensor):
        raise CheckpointError(f"{path}: {name} must be a tensor, but is of type {type(tensor).__name__}")
    if tensor.element_size() == 1 and not (tensor.dtype is stored_float8.STORED and name.endswith(".weight")):
        supported = "only 16 and 32 bits are supported, and weights in float8_e4m3fn"
        raise CheckpointError(f"{path}: {name} is quantised ({tensor.dtype}); {supported}")
    if tensor.is_complex() or tensor.layout is not torch.strided or tensor.device.type != "cpu":
        kind = f"{tensor.dtype}, {tensor.layout}, {tensor.device}"
        raise CheckpointError(f"{path}: {name} must be a dense tensor of real numbers, but is {kind}")
    if tensor.untyped_storage().nbytes() < tensor.nbytes:
        raise CheckpointError(f"{path}: {name} of shape {tuple(tensor.shape)} has fewer values than its shape needs")
    return tensor.detach().contiguous()


def fingerprint(weights: Mapping[str, Weights], pooling: Pooling) -> str:
    """SHA-256 over all weights and the pooling; names in other modules than the tower begin with the module's."""
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
