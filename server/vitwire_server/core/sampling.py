"""Choice of the frames of a clip."""

from dataclasses import dataclass
from enum import StrEnum


class SamplingRule(StrEnum):
    """Rule of a model's Hugging Face processor."""

    ALL = "all"
    COUNT = "count"
    RATE = "rate"
    RATE_TO_LAST = "rate_to_last"
    SECONDS = "seconds"
    RATE_BY_DURATION = "rate_by_duration"
    MIDDLES = "middles"
    RATE_WITHIN = "rate_within"
    GIVEN = "given"
    """Not a processor's: a request names the frames."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Settings of the rule; those that a rule does not use are 0. `preparing.rules.sampling` applies them."""

    rule: SamplingRule
    fps: float = 0.0
    frames: int = 0
    min_frames: int = 0
    max_frames: int = 0
    max_seconds: float = 0.0
    given: tuple[int, ...] = ()
    """Ascending indices."""
