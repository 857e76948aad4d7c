"""The times of a clip's frames, as transformers has them for prompts and for positions of Qwen2.5-VL."""

from dataclasses import replace
from fractions import Fraction
from io import BytesIO
from types import SimpleNamespace
from typing import Any

import av
import numpy as np
import pytest
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.processing_utils import ProcessorMixin
from transformers.video_utils import VideoMetadata

from encoded_files import clip, frames_of, numbered_clips
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


def test_frames_and_times_over_rates_orders_and_edit_lists() -> None:
    """Frames are numbered from the first that is shown; their times follow from the mean rate, as in processors."""
    for name, file in numbered_clips().items():
        with av.open(BytesIO(file)) as container:
            rate = float(container.streams.video[0].average_rate or 0)
        shown = frames_of(file, range(256))
        indices = sampled(len(shown), rate, QWEN, 1)
        with clips.decoded(file, recipe(1), 1 << 20) as (frames, _):
            np.testing.assert_array_equal(list(frames), [shown[each] for each in indices], name)
        metadata = VideoMetadata(total_num_frames=len(shown), fps=rate, frames_indices=indices)
        assert clips.measure(file, recipe(1), 1 << 20).frame_seconds == pytest.approx(metadata.timestamps), name
