"""The settings of a checkpoint's Hugging Face processor, read without building it."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from vitwire_server.core.items import Modality
from vitwire_server.core.models import Preprocessing, Resizing
from vitwire_server.towers.files import CheckpointError, optional_json, read_json

_BICUBIC = 3
_FILTERS = range(6)


@dataclass(frozen=True, slots=True)
class Rule:
    """What a checkpoint's files leave open about one modality."""

    spans: bool = False
    """The area bounds count all frames together."""
    pixels: tuple[int, int] | None = None
    """Area bounds where the files give none."""
    resizing: Resizing = Resizing.AREA


def read_preprocessing(folder: Path, rules: Mapping[Modality, Rule], *, channels: int) -> dict[Modality, Preprocessing]:
    """Settings of each modality that has a rule, from a checkpoint's files. Raises CheckpointError.

    Newer checkpoints keep all in processor_config.json. A checkpoint without settings for videos
    takes the images', with the area bounds of the rule.
    """
    nested = optional_json(folder / "processor_config.json")
    if not all(isinstance(nested.get(key, {}), dict) for key in ("image_processor", "video_processor")):
        raise CheckpointError(f"{folder / 'processor_config.json'} holds no settings of processors")
    image = nested.get("image_processor") or read_json(folder / "preprocessor_config.json")
    video = nested.get("video_processor") or optional_json(folder / "video_preprocessor_config.json")
    found = {
        Modality.IMAGE: image,
        Modality.VIDEO: {**image, "min_pixels": None, "max_pixels": None, "size": None, **video},
    }
    try:
        return {modality: _settings(found[modality], rule, channels) for modality, rule in rules.items()}
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(f"{folder}: the preprocessor's settings cannot be used: {_told(error)}") from error


def _settings(config: Mapping[str, Any], rule: Rule, channels: int) -> Preprocessing:
    """Raises KeyError, TypeError, ValueError or OverflowError over what a client could not work with."""
    own = config.get("media_proc_cfg") or config
    smallest, largest = _bounds(own, rule)
    settings = Preprocessing(
        min_pixels=smallest,
        max_pixels=largest,
        mean=tuple(map(float, own["image_mean"])),
        std=tuple(map(float, own["image_std"])),
        rescale_factor=float(own.get("rescale_factor", 1 / 255)),
        resample=int(own.get("resample", _BICUBIC)),
        bounds_span_frames=rule.spans,
        resizing=rule.resizing,
    )
    if not 0 < settings.min_pixels <= settings.max_pixels < 1 << 63:
        raise ValueError(f"min_pixels {settings.min_pixels} and max_pixels {settings.max_pixels} are no bounds")
    if not (len(settings.mean) == len(settings.std) == channels):
        raise ValueError(f"image_mean and image_std are not of {channels} channels")
    if not all(map(isfinite, (*settings.mean, *settings.std, settings.rescale_factor))) or min(settings.std) <= 0:
        raise ValueError("image_mean, image_std and rescale_factor must be finite, image_std positive")
    if settings.resample not in _FILTERS:
        raise ValueError(f"resample {settings.resample} is no filter of Pillow")
    return settings


def _bounds(config: Mapping[str, Any], rule: Rule) -> tuple[int, int]:
    """Smallest and largest area. Raises KeyError."""
    if rule.resizing is Resizing.OTHER:
        return 1, 1
    size = config.get("size")
    given = size if isinstance(size, dict) else {}
    smallest, largest = rule.pixels or (None, None)
    least = config.get("min_pixels") or given.get("shortest_edge", smallest)
    most = config.get("max_pixels") or given.get("longest_edge", largest)
    if least is None or most is None:
        raise KeyError("size.shortest_edge" if least is None else "size.longest_edge")
    return int(least), int(most)


def _told(error: Exception) -> str:
    return f"{error} is missing" if isinstance(error, KeyError) else str(error)
