"""The times of a clip's frames, as transformers has them for prompts and for positions of Qwen2.5-VL."""

from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.processing_utils import ProcessorMixin
from transformers.video_utils import VideoMetadata

from encoded_files import clip
from prepared import MODELS
from vitwire_server.core.items import Modality
from vitwire_server.core.sampling import Sampling, SamplingRule
from vitwire_server.preparing.files import clips
from vitwire_server.preparing.rules.recipe import Recipe
from vitwire_server.preparing.rules.sampling import sampled

PLAIN = MODELS["patches"][Modality.VIDEO]
QWEN = Sampling(SamplingRule.RATE, fps=2.0, min_frames=4, max_frames=768)
RATES = [Fraction(24000, 1001), Fraction(30000, 1001), Fraction(25), Fraction(60), Fraction(1), Fraction(1, 2)]
FRAME = np.zeros((16, 32, 3), np.uint8)


def recipe(temporal: int = 2, sampling: Sampling = QWEN) -> Recipe:
    return replace(PLAIN, temporal=temporal, settings=replace(PLAIN.settings, sampling=sampling))


def of_the_processor(metadata: VideoMetadata, temporal: int, monkeypatch: pytest.MonkeyPatch) -> float:
    """`second_per_grid_ts` by the code of Qwen2.5-VL's processor, whose parent's processing needs torchvision."""
    processed: dict[str, Any] = {"video_grid_thw": [(1, 2, 2)], "video_metadata": [metadata]}
    monkeypatch.setattr(ProcessorMixin, "_process_videos", lambda *_, **__: (processed, []))
    processor = Qwen2_5_VLProcessor.__new__(Qwen2_5_VLProcessor)
    processor.video_processor = SimpleNamespace(temporal_patch_size=temporal)
    found, _ = processor._process_videos([])
    (seconds,) = found["second_per_grid_ts"]
    return float(seconds)


@pytest.mark.parametrize("length", [4, 5, 47, 1199, 2000])
@pytest.mark.parametrize("rate", RATES, ids=str)
def test_seconds_per_group_are_those_of_the_processor(
    rate: Fraction, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = clip([FRAME] * length, float(rate), codec="mpeg4")
    for own in (recipe(), recipe(4), recipe(sampling=Sampling(SamplingRule.ALL))):
        assert own.settings.sampling
        found = clips.measure(file, own, 1 << 20)
        indices = sampled(length, float(rate), own.settings.sampling, own.temporal)
        metadata = VideoMetadata(total_num_frames=length, fps=float(rate), frames_indices=indices)
        assert found.second_per_grid == pytest.approx(of_the_processor(metadata, own.temporal, monkeypatch), rel=1e-9)
        assert found.frame_seconds == pytest.approx(metadata.timestamps, rel=1e-9)


def test_a_film() -> None:
    """The distance of the first two groups, 23.5 frames, would be 0.98."""
    found = clips.measure(clip([FRAME] * 1199, 24000 / 1001, codec="mpeg4"), recipe(), 1 << 20)
    assert found.second_per_grid == pytest.approx(1.0002, abs=5e-5)
