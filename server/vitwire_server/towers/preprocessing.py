"""The settings of a checkpoint's Hugging Face processor, read without building it."""

from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Any

from vitwire_server.core.items import Modality
from vitwire_server.core.models import Preprocessing
from vitwire_server.towers.checkpoint import CheckpointError, read_json
from vitwire_server.towers.families import Family

_BICUBIC = 3
_FILTERS = range(6)


def read_preprocessing(folder: Path, family: Family, channels: int = 3) -> dict[Modality, Preprocessing]:
    """Settings for images and videos from a checkpoint's files. Raises CheckpointError.

    Newer checkpoints keep both in processor_config.json. A checkpoint without settings for videos
    takes the images', with the family's area bounds.
    """
    nested = _optional(folder / "processor_config.json")
    if not all(isinstance(nested.get(key, {}), dict) for key in ("image_processor", "video_processor")):
        raise CheckpointError(f"{folder / 'processor_config.json'} holds no settings of processors")
    image = nested.get("image_processor") or read_json(folder / "preprocessor_config.json")
    video = nested.get("video_processor") or _optional(folder / "video_preprocessor_config.json")
    smallest, largest = family.video_pixels
    bounds = {"size": {"shortest_edge": smallest, "longest_edge": largest}}
    try:
        return {
            Modality.IMAGE: _settings(image, channels, spans=False),
            Modality.VIDEO: _settings(
                {**image, "min_pixels": None, "max_pixels": None, **bounds, **video},
                channels,
                spans=family.bounds_span_frames,
            ),
        }
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(f"{folder}: the preprocessor's settings cannot be used: {_told(error)}") from error


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _settings(config: Mapping[str, Any], channels: int, *, spans: bool) -> Preprocessing:
    """Raises KeyError, TypeError, ValueError or OverflowError over what a client could not work with."""
    size = config.get("size") or {}
    settings = Preprocessing(
        min_pixels=int(config.get("min_pixels") or size["shortest_edge"]),
        max_pixels=int(config.get("max_pixels") or size["longest_edge"]),
        mean=tuple(map(float, config["image_mean"])),
        std=tuple(map(float, config["image_std"])),
        rescale_factor=float(config.get("rescale_factor", 1 / 255)),
        resample=int(config.get("resample", _BICUBIC)),
        bounds_span_frames=spans,
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


def _told(error: Exception) -> str:
    return f"{error} is missing" if isinstance(error, KeyError) else str(error)
