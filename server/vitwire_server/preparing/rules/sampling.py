"""The frames of a clip that a model's Hugging Face processor uses."""

import math
from collections.abc import Callable, Sequence

import numpy as np

from vitwire_server.core.sampling import Sampling, SamplingRule

RATE_BY_DURATION = ((30.0, 3.0), (300.0, 1.0), (math.inf, 0.5))
"""Frames per second by the duration in seconds up to which they apply, for rate_by_duration."""
_MAX_DYNAMIC_FRAMES, _MAX_DYNAMIC_SECONDS = 640, 2400


def sampled(total: int, fps: float, sampling: Sampling, group: int = 1) -> list[int]:
    """Ascending indices of the frames to use, of a clip of `total` frames with `fps` frames per second.

    group: frames of one patch. Where a processor rejects a clip with too few frames, all of them are used.
    Raises ValueError for a clip without frames, or without a frame rate where the rule needs it.
    """
    if total < 1:
        raise ValueError("the clip has no frames")
    needs_rate = sampling.rule not in (SamplingRule.ALL, SamplingRule.GIVEN) and not (
        sampling.frames and sampling.rule in _COUNTING
    )
    if needs_rate and not (fps > 0 and math.isfinite(fps)):
        raise ValueError("the clip has no frame rate, which the model's processor needs to choose frames")
    chosen = _RULES[sampling.rule](total, fps, sampling, group)
    return sorted({int(index) for index in chosen if 0 <= index < total}) or [0]


def _all(total: int, fps: float, sampling: Sampling, group: int) -> Sequence[int]:
    del fps, sampling, group
    return range(total)


def _given(total: int, fps: float, sampling: Sampling, group: int) -> Sequence[int]:
    del total, fps, group
    return sampling.given


def _count(total: int, fps: float, sampling: Sampling, group: int) -> Sequence[int]:
    del group
    count = min(total, sampling.frames or max(1, int(total / fps * sampling.fps)))
    return [index * total // count for index in range(count)]


def _middles(total: int, fps: float, sampling: Sampling, group: int) -> Sequence[int]:
    del group
    count = min(total, sampling.frames or max(1, int(total / fps * sampling.fps)))
    return _stepped(total / count / 2, total, count)


def _rate(total: int, fps: float, sampling: Sampling, group: int) -> Sequence[int]:
    if sampling.frames:
        count = min(round(sampling.frames / group), total // group) * group
    else:
        most = min(sampling.max_frames, total) // group * group
        count = int(min(max(total / fps * sampling.fps, sampling.min_frames), most, total) // group * group)
    return _stepped(0.0, total, count) if count else range(total)


def _rate_to_last(total: int, fps: float, sampling: Sampling, group: int) -> Sequence[int]:
    del group
    count = sampling.frames
    if not count:
        count = min(max(int(total / fps * sampling.fps), sampling.min_frames), sampling.max_frames, total)
    return _spaced(total - 1, count, rounded=True)


def _rate_within(total: int, fps: float, sampling: Sampling, group: int) -> Sequence[int]:
    """A second is left out at both ends of a clip that is longer than a product of two settings, as in SmolVLM."""
    del group
    duration, most = total / fps, sampling.frames or sampling.max_frames
    count = max(1, min(round(sampling.fps * duration), most))
    first, last = 0, total - 1
    if duration - 2 > most * sampling.fps:
        first, last = int(fps), min(int(total - fps), total - 1)
    if first >= last:
        first, last = 0, total - 1
    return [int(place) for place in np.linspace(first, last, count)]


def _seconds(total: int, fps: float, sampling: Sampling, group: int) -> Sequence[int]:
    del group
    duration, last = total / fps, total - 1
    if duration <= sampling.max_seconds:
        count = max(math.floor(duration * sampling.fps), 1)
        return [min(last, math.ceil(index * fps / sampling.fps)) for index in range(count)]
    count = int(sampling.max_seconds * sampling.fps)
    if count >= total:
        return range(total)
    return [min(last, math.ceil(time * fps)) for time in np.linspace(0, duration, count)]


def _rate_by_duration(total: int, fps: float, sampling: Sampling, group: int) -> Sequence[int]:
    del sampling
    duration = total / fps
    bounded = min(duration, _MAX_DYNAMIC_SECONDS)
    rate = next(rate for most, rate in RATE_BY_DURATION if bounded <= most)
    count = min(int(bounded * rate * group), _MAX_DYNAMIC_FRAMES)
    if total < count:
        return _spaced(total - 1, count)
    chosen = _first_of_intervals(total, fps, 1 / (group * rate), int(duration))
    if len(chosen) < count:
        first, last = (chosen[0], chosen[-1]) if chosen else (0, total - 1)
        return [first + index for index in _spaced(last - first, count)]
    return _spaced(total - 1, count) if len(chosen) > count else chosen


def _first_of_intervals(total: int, fps: float, interval: float, seconds: int) -> list[int]:
    """The first frame of each interval, within this many seconds."""
    chosen: list[int] = []
    due, frame_seconds = 0.0, 1 / fps
    for index in range(total):
        if index * frame_seconds >= due:
            due += interval
            chosen.append(index)
            if due >= seconds:
                break
    return chosen


def _stepped(first: float, total: int, count: int) -> list[int]:
    """Multiples of a step, rounded down from float32 as the processors do."""
    step = total / count
    return [int(np.float32(first + index * step)) for index in range(count)]


def _spaced(last: int, count: int, *, rounded: bool = False) -> list[int]:
    places = np.linspace(0, last, count)
    return [int(place) for place in (places.round() if rounded else places)]


_COUNTING = (SamplingRule.COUNT, SamplingRule.MIDDLES, SamplingRule.RATE, SamplingRule.RATE_TO_LAST)
_RULES: dict[SamplingRule, Callable[[int, float, Sampling, int], Sequence[int]]] = {
    SamplingRule.ALL: _all,
    SamplingRule.GIVEN: _given,
    SamplingRule.COUNT: _count,
    SamplingRule.MIDDLES: _middles,
    SamplingRule.RATE: _rate,
    SamplingRule.RATE_TO_LAST: _rate_to_last,
    SamplingRule.RATE_WITHIN: _rate_within,
    SamplingRule.SECONDS: _seconds,
    SamplingRule.RATE_BY_DURATION: _rate_by_duration,
}
