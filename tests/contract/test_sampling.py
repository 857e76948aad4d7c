"""Frames that are chosen of clips, against the stock video processors' own functions.

Their modules need torchvision, which this environment lacks, so the functions are compiled from the files.
"""

import ast
import importlib.util
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers.video_utils import default_sample_indices_fn

from checkpoints import Checkpoints
from prepared import of_clips, of_images
from vitwire_server.core.sampling import Sampling, SamplingRule
from vitwire_server.preparing.rules.sampling import sampled
from vitwire_server.towers.processors.sampling import read_sampling

CLIPS = [
    (total, fps)
    for total in (1, 2, 3, 4, 5, 7, 16, 29, 30, 31, 48, 49, 120, 121, 299, 900, 1001, 7201, 30_000)
    for fps in (1.0, 10.0, 14.23, 23.976, 24.0, 25.0, 29.97, 30.0, 59.94, 60.0)
]


def stock(model: str) -> Callable[..., Any]:
    """The `sample_frames` of a model's video processor."""
    found = importlib.util.find_spec("transformers")
    assert found
    assert found.origin
    file = Path(found.origin).parent / "models" / model / f"video_processing_{model}.py"
    tree = ast.parse(file.read_text())
    (function,) = [
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "sample_frames"
    ]
    module = ast.parse("from __future__ import annotations")
    module.body.append(function)
    names: dict[str, Any] = {"math": math, "np": np, "torch": torch}
    exec(compile(module, str(file), "exec"), names)
    function_object: Callable[..., Any] = names["sample_frames"]
    return function_object


class Metadata(SimpleNamespace):
    """A clip's, whose fields are its items too."""

    def __getitem__(self, name: str) -> object:
        return getattr(self, name)


def chosen(model: str, total: int, clip_fps: float, *, group: int = 2, **settings: Any) -> list[int]:
    """The distinct frames that the stock function chooses, as its video reader takes them."""
    metadata = Metadata(total_num_frames=total, fps=clip_fps, duration=total / clip_fps)
    processor = SimpleNamespace(**{"temporal_patch_size": group, "num_frames": None, **settings})
    given = {name: settings[name] for name in ("num_frames", "fps", "initial_shift") if settings.get(name)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        indices = stock_of[model](processor, metadata, **given)
    return sorted({int(index) for index in indices if index < total})


stock_of = {
    name: stock(name) for name in ("qwen2_vl", "qwen3_vl", "cosmos3_edge", "glm4v", "glm46v", "internvl", "smolvlm")
}


@pytest.mark.parametrize(
    ("model", "rule", "settings"),
    [
        ("qwen2_vl", "rate", {"fps": 2.0, "min_frames": 4, "max_frames": 768}),
        ("qwen2_vl", "rate", {"fps": 1.0, "min_frames": 8, "max_frames": 32}),
        ("qwen2_vl", "rate", {"num_frames": 9}),
        ("qwen3_vl", "rate_to_last", {"fps": 2, "min_frames": 4, "max_frames": 768}),
        ("qwen3_vl", "rate_to_last", {"fps": 0.7, "min_frames": 2, "max_frames": 20}),
        ("qwen3_vl", "rate_to_last", {"num_frames": 9}),
        ("cosmos3_edge", "rate_to_last", {"fps": 2, "min_frames": 4, "max_frames": 768}),
        ("glm4v", "seconds", {"fps": 2, "max_duration": 300}),
        ("glm4v", "seconds", {"fps": 0.3, "max_duration": 20}),
        ("glm46v", "rate_by_duration", {}),
        ("smolvlm", "rate_within", {"fps": 1, "num_frames": 64}),
        ("smolvlm", "rate_within", {"fps": 0.4, "num_frames": 20}),
        ("internvl", "middles", {"num_frames": 8, "fps": None, "initial_shift": True}),
        ("internvl", "middles", {"num_frames": None, "fps": 1.5, "initial_shift": True}),
    ],
)
def test_rules_choose_the_frames_of_the_stock_processors(model: str, rule: str, settings: dict[str, Any]) -> None:
    sampling = Sampling(
        SamplingRule(rule),
        float(settings.get("fps") or 0),
        settings.get("num_frames") or 0,
        settings.get("min_frames", 0),
        settings.get("max_frames", 0),
        settings.get("max_duration", 0.0),
    )
    compared = 0
    for total, fps in CLIPS:
        try:
            theirs = chosen(model, total, fps, **{"min_frames": 4, "max_frames": 768, "fps": None} | settings)
        except (ValueError, ZeroDivisionError, RuntimeError):
            continue  # the stock processor rejects clips with too few frames
        if not theirs:
            continue
        assert sampled(total, fps, sampling, 2) == theirs, (total, fps)
        compared += 1
    assert compared > len(CLIPS) / 2


@pytest.mark.parametrize("count", [1, 8, 32])
def test_a_fixed_number_is_that_of_the_default_function(count: int) -> None:
    for total, fps in CLIPS:
        if total >= count:
            metadata = SimpleNamespace(total_num_frames=total, fps=fps)
            theirs = default_sample_indices_fn(metadata, num_frames=count)
            assert sampled(total, fps, Sampling(SamplingRule.COUNT, frames=count)) == list(theirs)


@pytest.mark.parametrize("rule", SamplingRule)
def test_short_clips_keep_at_least_one_frame_in_order(rule: SamplingRule) -> None:
    sampling = Sampling(rule, fps=2.0, frames=0 if rule.startswith("rate") else 8, min_frames=4, max_frames=8)
    for total in range(1, 12):
        frames = sampled(total, 30.0, sampling, 2)
        assert frames
        assert frames == sorted(set(frames))
        assert frames[-1] < total
    with pytest.raises(ValueError, match="has no frames"):
        sampled(0, 30.0, sampling)


def test_a_clip_without_a_rate_is_rejected_by_rules_that_need_it() -> None:
    with pytest.raises(ValueError, match="no frame rate"):
        sampled(10, 0.0, Sampling(SamplingRule.RATE, fps=2.0, min_frames=4, max_frames=8))
    assert sampled(10, 0.0, Sampling(SamplingRule.COUNT, frames=5)) == [0, 2, 4, 6, 8]


def test_files_of_checkpoints_set_the_rule() -> None:
    qwen = read_sampling("Qwen3VL", {})
    assert qwen
    assert (qwen.rule, qwen.fps, qwen.max_frames) == (SamplingRule.RATE_TO_LAST, 2.0, 768)
    named = read_sampling("Glm4v", {"video_processor_type": "Glm46VVideoProcessor", "fps": 4})
    assert named
    assert (named.rule, named.fps) == (SamplingRule.RATE_BY_DURATION, 4.0)
    counted = read_sampling("Qwen2VL", {"num_frames": 12})
    assert counted
    assert counted.frames == 12
    assert read_sampling("", {}) is None
    assert read_sampling("SmolVLM", {}) == read_sampling("SmolVLM", {"num_frames": 64})
    nested = read_sampling("SmolVLM", {"video_sampling": {"fps": 2, "max_frames": 16, "video_size": {}}})
    assert nested
    assert (nested.fps, nested.max_frames) == (2.0, 16)
    with pytest.raises(ValueError, match="fps must be a number"):
        read_sampling("Qwen2VL", {"fps": "fast"})


def test_the_rule_of_a_checkpoint(checkpoints: Checkpoints) -> None:
    qwen, smol = checkpoints("qwen3_vl"), checkpoints("smolvlm")
    rate = Sampling(SamplingRule.RATE_TO_LAST, fps=2.0, min_frames=4, max_frames=768)
    assert of_clips(qwen).settings.sampling == rate
    assert of_images(qwen).settings.sampling is None
    assert of_clips(smol).settings.sampling == Sampling(SamplingRule.RATE_WITHIN, fps=1.0, max_frames=64)
