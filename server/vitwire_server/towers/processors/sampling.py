"""The rule by which a checkpoint's video processor samples frames."""

from collections.abc import Mapping
from dataclasses import replace
from math import isfinite
from typing import Any

from vitwire_server.core.sampling import Sampling, SamplingRule

_PROCESSORS = {
    "Qwen2VLVideoProcessor": Sampling(SamplingRule.RATE, fps=2.0, min_frames=4, max_frames=768),
    "Qwen3VLVideoProcessor": Sampling(SamplingRule.RATE_TO_LAST, fps=2.0, min_frames=4, max_frames=768),
    "Cosmos3EdgeVideoProcessor": Sampling(SamplingRule.RATE_TO_LAST, fps=2.0, min_frames=4, max_frames=768),
    "CohereCompassVideoProcessor": Sampling(SamplingRule.RATE_TO_LAST, fps=2.0, min_frames=4, max_frames=768),
    "Glm4vVideoProcessor": Sampling(SamplingRule.SECONDS, fps=2.0, max_seconds=300.0),
    "Glm46VVideoProcessor": Sampling(SamplingRule.RATE_BY_DURATION),
    "InternVLVideoProcessor": Sampling(SamplingRule.MIDDLES, frames=8),
    "LlavaNextVideoVideoProcessor": Sampling(SamplingRule.COUNT, frames=8),
    "LlavaOnevisionVideoProcessor": Sampling(SamplingRule.COUNT, frames=8),
    "Gemma4VideoProcessor": Sampling(SamplingRule.COUNT, frames=32),
    "SmolVLMVideoProcessor": Sampling(SamplingRule.RATE_WITHIN, fps=1.0, max_frames=64),
}
"""Defaults of each class. If a class samples only by a rate or a number from the caller, the values of its examples."""
_COUNTED = (SamplingRule.COUNT, SamplingRule.MIDDLES, SamplingRule.RATE, SamplingRule.RATE_TO_LAST)


def read_sampling(stem: str, config: Mapping[str, Any]) -> Sampling | None:
    """The rule for clips, by the keys of the videos' file; None if the model has none. Raises ValueError.

    The class that the file names decides. If it names none, or one that is not known here, the class of the model's
    processor does, whose name begins with `stem`.
    """
    named = str(config.get("video_processor_type"))
    default = _PROCESSORS.get(named) or _PROCESSORS.get(f"{stem}VideoProcessor")
    if default is None:
        return None
    if default.rule is SamplingRule.RATE_WITHIN:
        config = {"max_frames": config.get("num_frames"), **config, **(config.get("video_sampling") or {})}
    rate = _number(config, "fps", default.fps)
    found = replace(
        default,
        fps=rate,
        min_frames=int(_number(config, "min_frames", default.min_frames)),
        max_frames=int(_number(config, "max_frames", default.max_frames)),
        max_seconds=_number(config, "max_duration", default.max_seconds),
    )
    if default.rule in _COUNTED:
        of_rate = 0 if config.get("fps") else default.frames
        found = replace(found, frames=int(_number(config, "num_frames", of_rate)))
    return found


def _number(config: Mapping[str, Any], key: str, default: float) -> float:
    value = config.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value) or value < 0:
        raise ValueError(f"{key} must be a number that is not negative, got {value!r}")
    return float(value)
