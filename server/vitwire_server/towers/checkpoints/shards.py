"""Files of weights: safetensors, and what torch.save writes, of which nothing but tensors is read."""

import struct
from collections.abc import Collection
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vitwire_server.towers.checkpoints.building import BROKEN
from vitwire_server.towers.files import CheckpointError

_SAFETENSORS = ".safetensors"
_WHOLE_BYTES = 4 << 30
"""Largest file of the format before torch 1.6, which cannot be mapped and is read as a whole."""


def names_in(path: Path) -> list[str]:
    """Names of the weights in a file. Raises CheckpointError."""
    if path.suffix != _SAFETENSORS:
        return list(_unpickled(path))
    try:
        with safe_open(path, framework="pt") as tensors:
            return list(tensors.keys())
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a safetensors file: {error}") from error


def tensors_in(path: Path, names: Collection[str]) -> dict[str, Tensor]:
    """These weights of a file, on the host, contiguous. Raises CheckpointError."""
    return {name: _served(tensor, name, path) for name, tensor in _stored(path, names).items()}


def _stored(path: Path, names: Collection[str]) -> dict[str, Any]:
    if path.suffix == _SAFETENSORS:
        try:
            with safe_open(path, framework="pt") as tensors:
                return {name: tensors.get_tensor(name) for name in names}
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} is not a safetensors file of this checkpoint: {error}") from error
    held = _unpickled(path)
    if absent := [name for name in names if name not in held]:
        raise CheckpointError(f"{path} does not contain tensor {absent[0]}")
    return {name: held[name] for name in names}


def _unpickled(path: Path) -> dict[str, Any]:
    """What torch.save wrote of a state dict, mapped into memory. Runs no code of the file. Raises CheckpointError."""
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
        raise CheckpointError(f"{path} holds no names of tensors, but a {type(found).__name__}")
    return {name: value for name, value in found.items() if isinstance(name, str)}


def _reason(error: Exception) -> str:
    """The line that says what was found; torch adds advice, such as to run the file's code."""
    lines = [line.partition("WeightsUnpickler error: ") for line in str(error).splitlines()]
    said = next((after for _, _, after in lines if after), None)
    return said or next((line for line, _, _ in lines if "GLOBAL" in line), lines[0][0] if lines else "it is empty")


def _served(tensor: Any, name: str, path: Path) -> Tensor:  # noqa: ANN401 - whatever a file holds
    """A weight that a tower can compute with. Raises CheckpointError."""
    if not isinstance(tensor, Tensor):
        raise CheckpointError(f"{path}: {name} is no tensor, but a {type(tensor).__name__}")
    if tensor.element_size() == 1:
        raise CheckpointError(f"{path}: {name} is quantised ({tensor.dtype}); towers are served in 16 or 32 bits only")
    if tensor.is_complex() or tensor.layout is not torch.strided or tensor.device.type != "cpu":
        kind = f"{tensor.dtype}, {tensor.layout}, {tensor.device}"
        raise CheckpointError(f"{path}: {name} must be a dense tensor of real numbers, but is {kind}")
    if tensor.untyped_storage().nbytes() < tensor.nbytes:
        raise CheckpointError(f"{path}: {name} of shape {tuple(tensor.shape)} has fewer numbers than its shape says")
    return tensor.detach().contiguous()
