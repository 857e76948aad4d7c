"""Checkpoints that the benchmarks of the service are run on, with random weights."""

import json
from pathlib import Path

from bench.models import PUBLISHED, shrunk, write

TINY = (2, 128)
"""Layers and columns of a small tower."""
_THIN = {"depth": 3, "hidden_size": 64, "intermediate_size": 128, "num_heads": 1}


def published(name: str, folder: Path, tokens: int, *, tiny: bool) -> Path:
    """A published tower, or a small one of its shape, written unless it is there.

    Its processor shrinks images to `tokens` at most.
    """
    path = folder / "preprocessor_config.json"
    if not path.exists():  # written last
        model_type, fields = PUBLISHED[name]
        write(model_type, shrunk(fields, *TINY) if tiny else fields, folder)
    vision, settings = json.loads((folder / "config.json").read_text())["vision_config"], json.loads(path.read_text())
    settings["size"]["longest_edge"] = tokens * (vision["patch_size"] * vision["spatial_merge_size"]) ** 2
    path.write_text(json.dumps(settings))
    return folder


def with_rows_of(columns: int, levels: int, folder: Path) -> Path:
    """A tower of next to no computation with rows of `columns * (1 + levels)` values."""
    model_type, fields = PUBLISHED["Qwen3-VL-8B"]
    own = {"deepstack_visual_indexes": list(range(levels)), "out_hidden_size": columns}
    write(model_type, {**fields, **_THIN, **own}, folder)
    return folder
