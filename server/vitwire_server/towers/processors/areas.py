"""Preprocessing by area: images and clips resized within bounds of their areas, then cut into patches."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vitwire_server.core.items import Modality
from vitwire_server.core.models import Preprocessing, Resizing
from vitwire_server.towers.processors.settings import ProcessorFiles, bounded, read_settings


@dataclass(frozen=True, slots=True)
class AreaRule:
    """What a checkpoint's files leave open about one modality."""

    pixels: tuple[int, int] | None = None
    """Area bounds where the files give none."""
    spans_frames: bool = False
    """The area bounds count all frames together, an image's repeated ones included."""
    resizing: Resizing = Resizing.AREA


def read_preprocessing(
    folder: Path, rules: Mapping[Modality, AreaRule], *, channels: int, converts: bool
) -> dict[Modality, Preprocessing]:
    """Settings of each modality that has a rule, from a checkpoint's files. Raises CheckpointError.

    A checkpoint without settings for videos takes the images', with the area bounds of the rule.
    """

    def settings(files: ProcessorFiles) -> dict[Modality, Preprocessing]:
        unbounded = {**files.image, "min_pixels": None, "max_pixels": None, "size": None}
        found = {Modality.IMAGE: files.image, Modality.VIDEO: {**unbounded, **files.own_video}}
        return {modality: _settings(found[modality], rule) for modality, rule in rules.items()}

    return read_settings(folder, settings, channels=channels, required=True, converts=converts)


def _settings(config: Mapping[str, Any], rule: AreaRule) -> Preprocessing:
    """May raise what `read_settings` catches."""
    own = config.get("media_proc_cfg") or config
    settings = bounded(own, _bounds(own, rule), (own["image_mean"], own["image_std"]))
    return replace(settings, bounds_span_frames=rule.spans_frames, resizing=rule.resizing)


def _bounds(config: Mapping[str, Any], rule: AreaRule) -> tuple[int, int]:
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
