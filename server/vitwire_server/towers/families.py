"""The table of models: one row per family of checkpoints."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Family:
    """What differs between the packed `grid_thw` towers; the rest is in `PackedTower`."""

    model_type: str
    """`model_type` of the checkpoint's config.json."""
    title: str
    """The models' published name."""
    tower: str
    """Module under `transformers.models` and class of the vision tower."""
    prefixes: tuple[str, ...]
    """What the tower's weights are named after in checkpoints, in the order tried."""
    width: str
    """Field of the vision config that holds the columns of an embedding's main part."""
    interpolates: bool = False
    """Learned positions are resampled to each grid (`interp_indices`, `interp_weights`)."""
    windows: bool = False
    """Most layers attend within windows (`window_index`, `cu_window_seqlens`)."""
    deepstack: bool = False
    """Features of inner layers are appended to each row."""
    video_pixels: tuple[int, int] = (128 * 28 * 28, 768 * 28 * 28)
    """Area bounds of videos where the checkpoint has no video preprocessor."""
    bounds_span_frames: bool = False
    """The area bounds of videos count all frames of a clip together."""
    transformers: str = "5.17.0"
    """Oldest release of transformers that computes this tower correctly."""


_QWEN_PREFIXES = ("model.visual.", "visual.")

_QWEN3_VL = Family(
    model_type="qwen3_vl",
    title="Qwen3-VL",
    tower="qwen3_vl.modeling_qwen3_vl:Qwen3VLVisionModel",
    prefixes=_QWEN_PREFIXES,
    width="out_hidden_size",
    interpolates=True,
    deepstack=True,
    video_pixels=(128 * 32 * 32, 768 * 32 * 32),
    bounds_span_frames=True,
)
_ROWS = (
    Family(
        model_type="qwen2_vl",
        title="Qwen2-VL",
        tower="qwen2_vl.modeling_qwen2_vl:Qwen2VisionTransformerPretrainedModel",
        prefixes=_QWEN_PREFIXES,
        width="hidden_size",
    ),
    Family(
        model_type="qwen2_5_vl",
        title="Qwen2.5-VL",
        tower="qwen2_5_vl.modeling_qwen2_5_vl:Qwen2_5_VisionTransformerPretrainedModel",
        prefixes=_QWEN_PREFIXES,
        width="out_hidden_size",
        windows=True,
    ),
    _QWEN3_VL,
    replace(
        _QWEN3_VL,
        model_type="qwen3_vl_moe",
        title="Qwen3-VL MoE",
        tower="qwen3_vl_moe.modeling_qwen3_vl_moe:Qwen3VLMoeVisionModel",
    ),
)

FAMILIES: Mapping[str, Family] = MappingProxyType({row.model_type: row for row in _ROWS})
