"""The settings of a checkpoint's Hugging Face processor, read without building it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vitwire_server.core.items import Modality
from vitwire_server.core.models import Preprocessing
from vitwire_server.towers.checkpoint import CheckpointError, read_json
from vitwire_server.towers.families import Family

_BICUBIC = 3


def read_preprocessing(folder: Path, family: Family) -> dict[Modality, Preprocessing]:
    """Settings for images and videos from a checkpoint's files. Raises CheckpointError.

    Newer checkpoints keep both in processor_config.json. A checkpoint without settings for videos
    takes the images', with the family's area bounds.
    """
    nested = _optional(folder / "processor_config.json")
    image = nested.get("image_processor") or read_json(folder / "preprocessor_config.json")
    video = nested.get("video_processor") or _optional(folder / "video_preprocessor_config.json")
    smallest, largest = family.video_pixels
    bounds = {"size": {"shortest_edge": smallest, "longest_edge": largest}}
    try:
        return {
            Modality.IMAGE: _settings(image, spans=False),
            Modality.VIDEO: _settings(
                {**image, "min_pixels": None, "max_pixels": None, **bounds, **video},
                spans=family.bounds_span_frames,
            ),
        }
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder}: the preprocessor's settings cannot be used: {error!r}") from error


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _settings(config: Mapping[str, Any], *, spans: bool) -> Preprocessing:
    size = config.get("size") or {}
    return Preprocessing(
        min_pixels=int(config.get("min_pixels") or size["shortest_edge"]),
        max_pixels=int(config.get("max_pixels") or size["longest_edge"]),
        mean=tuple(map(float, config["image_mean"])),
        std=tuple(map(float, config["image_std"])),
        rescale_factor=float(config.get("rescale_factor", 1 / 255)),
        resample=int(config.get("resample", _BICUBIC)),
        bounds_span_frames=spans,
    )
