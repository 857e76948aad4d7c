"""Which reference a row of the table is compared with."""

from pathlib import Path

import torch

from assembled_reference import ASSEMBLED, AssembledReference
from ovis_reference import OriginalOvis
from raster_reference import RASTER, RasterReference
from reference import Kimi, KimiVL, Reference, SquarePatches
from tile_reference import TileReference
from vitwire_server.towers.registry import FAMILIES

_OWN: dict[str, type[Reference]] = {"kimi_k25": Kimi, "kimi_vl": KimiVL, "paddleocr_vl": SquarePatches}
"""Models that are asked in another way than others of their layout."""


def reference_of(
    model_type: str, checkpoint: Path, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> Reference | TileReference | RasterReference | AssembledReference | OriginalOvis:
    """Plain transformers for a checkpoint of this type."""
    if model_type in RASTER:
        return RASTER[model_type](checkpoint, dtype, device)
    if model_type == "ovis":
        return OriginalOvis(checkpoint, dtype, device)
    if model_type in ASSEMBLED:
        return ASSEMBLED[model_type](checkpoint, dtype, device)
    usual = TileReference if FAMILIES[model_type].layout == "tiles" else Reference
    return _OWN.get(model_type, usual)(checkpoint, dtype, device)
