"""Checkpoints that the benchmarks of the service are run on, with random weights."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.models import PUBLISHED, shrunk, write

ALIASES = {"qwen3_vl:8b-like": "Qwen3-VL-8B", "qwen2_5_vl:7b-like": "Qwen2.5-VL-7B", "qwen2_vl:7b-like": "Qwen2-VL-7B"}
"""Names of published towers as service-bench takes them."""
TINY = (2, 128)
"""Layers and columns of a small tower."""
_TYPE, _FIELDS = PUBLISHED["Qwen3-VL-8B"]
_THIN = {"depth": 3, "hidden_size": 64, "intermediate_size": 128, "num_heads": 1}


def published(name: str, folder: Path, *, tiny: bool) -> Path:
    """A published tower, or a small one of its shape."""
    model_type, fields = PUBLISHED[ALIASES.get(name, name)]
    folder.mkdir(parents=True, exist_ok=True)
    write(model_type, shrunk(fields, *TINY) if tiny else fields, folder)
    return folder


def bounded(folder: Path, tokens: int) -> None:
    """Let Qwen's processor of a checkpoint shrink images to so many tokens at most; others stay."""
    vision = json.loads((folder / "config.json").read_text())["vision_config"]
    if "spatial_merge_size" not in vision:
        return
    path = folder / "preprocessor_config.json"
    settings = json.loads(path.read_text())
    settings["size"]["longest_edge"] = tokens * (vision["patch_size"] * vision["spatial_merge_size"]) ** 2
    path.write_text(json.dumps(settings))


def is_written(folder: Path) -> bool:
    """Whether all of a checkpoint is there: `write` ends with this file."""
    return (folder / "preprocessor_config.json").exists()


def with_rows_of(columns: int, levels: int, folder: Path) -> Path:
    """A tower of next to no computation with rows of `columns * (1 + levels)` values."""
    indexes = {"deepstack_visual_indexes": list(range(levels))}
    return _written({**_FIELDS, **_THIN, **indexes, "out_hidden_size": columns}, folder)


def _written(fields: Mapping[str, Any], folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    write(_TYPE, fields, folder)
    return folder
