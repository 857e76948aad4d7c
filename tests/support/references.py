"""Which reference a row of the table is compared with."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from assembled_reference import ASSEMBLED
from ovis_reference import OriginalOvis
from plain_reference import PLAIN, PlainReference
from published_reference import PUBLISHED
from raster_reference import RASTER
from reference import Kimi, Reference, SquarePatches, VideoLlama3, renamed
from rotary_reference import ROTARY
from tile_reference import TileReference
from vitwire_server.towers.registry import FAMILIES

_RENAMED: Mapping[Callable[..., Any], tuple[str, ...]] = {
    Kimi: ("kimi_vl",),
    Reference: ("alpamayo2_super", "intern_s2_preview", "interns1_pro", "interns2_mobius", "opencua"),
    TileReference: ("deepseek_vl_v2-deeplip_b_l", "interns1", "unlimited-ocr"),
}
"""Models that transformers has under other names."""
_OWN: Mapping[str, Callable[..., Any]] = {
    "kimi_k25": Kimi,
    "ovis": OriginalOvis,
    "paddleocr_vl": SquarePatches,
    "video_llama_3": VideoLlama3,
    **{name: renamed(kind, name) for kind, names in _RENAMED.items() for name in names},
    **dict.fromkeys(PLAIN, PlainReference),
    **ASSEMBLED,
    **PUBLISHED,
    **RASTER,
    **ROTARY,
}
"""Models that are asked in another way than others of their layout."""


def reference_of(model_type: str, checkpoint: Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Any:
    """Plain transformers for a checkpoint of this type, or what its authors published.

    It has `item(grid, pixels, crops)`, the rows of one item alone; that of packed patches has `encode` too.
    """
    usual = TileReference if FAMILIES[model_type].layout == "tiles" else Reference
    return _OWN.get(model_type, usual)(checkpoint, dtype, device)
