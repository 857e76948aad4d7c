"""Ways to break a checkpoint's files, and to load what came of it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from vitwire_server.core.pooling import Pooling
from vitwire_server.towers.checkpoints.checkpoint import Loaded, load_tower, open_checkpoint
from vitwire_server.towers.checkpoints.lora import Adapter
from vitwire_server.towers.files import CheckpointError

Break = Callable[[Path], Any]


def edit(name: str, **changes: Any) -> Break:
    """Set keys of a JSON file; those of an inner object after two underscores."""

    def change(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        for path, value in changes.items():
            *owners, key = path.split("__")
            target = content
            for owner in owners:
                target = target[owner]
            target[key] = value
        (folder / name).write_text(json.dumps(content))

    return change


def config(**changes: Any) -> Break:
    """Set keys of `config.json`, as `edit` does."""
    return edit("config.json", **changes)


def write(name: str, content: str) -> Break:
    """Put a file of this content there."""
    return lambda folder: (folder / name).write_text(content)


def refused(folder: Path, harm: Break, message: str) -> str:
    """The error of a checkpoint that is broken in this way, of which the message is a part."""
    harm(folder)
    with pytest.raises(CheckpointError, match=message) as error:
        load(folder)
    return str(error.value)


def load(folder: Path, pooling: Pooling = Pooling.NONE, adapter: Adapter | None = None) -> Loaded:
    """Everything that a server reads of a checkpoint."""
    checkpoint = open_checkpoint(str(folder)).pooled(pooling)
    checkpoint.preprocessing()
    return load_tower(checkpoint, dtype=torch.float32, device=torch.device("cpu"), adapter=adapter)
