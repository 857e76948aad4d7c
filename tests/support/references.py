"""Which reference a row of the table is compared with."""

from pathlib import Path

import torch

from assembled_reference import ASSEMBLED, AssembledReference
from plain_reference import PLAIN, PlainReference
from published_reference import PUBLISHED, DeepseekVL2, Eagle, MiniCPMV
from raster_reference import RASTER, RasterReference
from reference import Kimi, KimiVL, Reference, SquarePatches, VideoLlama3
from tile_reference import TileReference
from videollama_reference import OriginalVideoLlama3
from vitwire_server.towers.registry import FAMILIES

_OWN: dict[str, type[Reference]] = {
    "kimi_k25": Kimi,
    "kimi_vl": KimiVL,
    "paddleocr_vl": SquarePatches,
    "video_llama_3": VideoLlama3,
}
"""Models that are asked in another way than others of their layout."""


def reference_of(
    model_type: str, checkpoint: Path, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> (
    Reference
    | OriginalVideoLlama3
    | TileReference
    | RasterReference
    | PlainReference
    | AssembledReference
    | MiniCPMV
    | DeepseekVL2
    | Eagle
):
    """Plain transformers for a checkpoint of this type, or what its authors published."""
    if model_type in PUBLISHED:
        return PUBLISHED[model_type](checkpoint, dtype, device)
    if model_type in PLAIN:
        return PlainReference(checkpoint, dtype, device)
    if model_type == "videollama3_qwen2":
        return OriginalVideoLlama3(checkpoint, dtype, device)
    if model_type in RASTER:
        return RASTER[model_type](checkpoint, dtype, device)
    if model_type in ASSEMBLED:
        return ASSEMBLED[model_type](checkpoint, dtype, device)
    usual = TileReference if FAMILIES[model_type].layout == "tiles" else Reference
    return _OWN.get(model_type, usual)(checkpoint, dtype, device)
