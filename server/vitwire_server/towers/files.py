"""JSON files of a checkpoint, and the error over one that cannot be served."""

import json
import os
from pathlib import Path
from typing import Any

from vitwire_flags.regular_files import read_regular

_MOST_BYTES = 256 << 20


class CheckpointError(Exception):
    """The checkpoint cannot be served; the message is one sentence for the operator."""


def local_folder(model: str) -> Path | None:
    """The directory that `--model` names, with a configuration in it; None for a hub id. Raises CheckpointError."""
    folder = Path(os.path.expanduser(model))  # noqa: PTH111 - the other raises for an unknown user
    if folder.is_dir():
        read_json(folder / "config.json")
        return folder
    if folder.exists():
        raise CheckpointError(f"{model} is a file; name the directory of the checkpoint")
    if model.count("/") != 1 or model.startswith(("/", ".", "~")):
        where = f" in the directory {folder.parent.absolute()}" if folder.parent.is_dir() else ""
        raise CheckpointError(f"{model} does not exist{where}: expected a directory or a hub id, such as owner/name")
    return None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises CheckpointError if there is none."""
    try:
        content = json.loads(read_regular(path, _MOST_BYTES))
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} holds no {path.name}: is it a model directory in hub layout?") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return content


def optional_json(path: Path) -> dict[str, Any]:
    """The JSON object of a file that may be absent: empty then. Raises CheckpointError."""
    return read_json(path) if path.exists() else {}
