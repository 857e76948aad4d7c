"""The settings of a processor that cuts tiles, read from a checkpoint's files without building it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any

from vitwire_server.core.items import Modality
from vitwire_server.core.models import Preprocessing
from vitwire_server.core.tilings import Tiling, TilingRule
from vitwire_server.towers.files import CheckpointError, optional_json

_FILTERS = range(6)
BILINEAR, BICUBIC = 2, 3

CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


@dataclass(frozen=True, slots=True)
class Processor:
    """Keys of a processor's files for images and for videos; the former where the latter has none of its own.

    What is read of them raises KeyError, TypeError, ValueError or OverflowError if a client could not work with it.
    """

    image: Mapping[str, Any]
    video: Mapping[str, Any]
    own_video: Mapping[str, Any]
    """Keys of the videos' file alone."""

    @classmethod
    def read(
        cls, folder: Path, settings: Callable[["Processor"], dict[Modality, Preprocessing]]
    ) -> dict[Modality, Preprocessing]:
        """Settings made of a checkpoint's files, new layout or old. Raises CheckpointError."""
        nested = optional_json(folder / "processor_config.json")
        if not all(isinstance(nested.get(key, {}), dict) for key in ("image_processor", "video_processor")):
            raise CheckpointError(f"{folder / 'processor_config.json'} holds no settings of processors")
        image = nested.get("image_processor") or optional_json(folder / "preprocessor_config.json")
        video = nested.get("video_processor") or optional_json(folder / "video_preprocessor_config.json")
        try:
            return {each: checked(one) for each, one in settings(cls(image, {**image, **video}, video)).items()}
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            told = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise CheckpointError(f"{folder}: the preprocessor's settings cannot be used: {told}") from error


def square(config: Mapping[str, Any], key: str = "size", default: int | None = None) -> int:
    """The side of a square size, in any of the forms that processors write it in."""
    size = config.get(key, default)
    if size is None:
        raise KeyError(key)
    if isinstance(size, dict):
        height = size.get("height", size.get("shortest_edge", size.get("longest_edge")))
        width = size.get("width", height)
        if height is None or height != width:
            raise ValueError(f"{key} {size} is no square")
        size = height
    return int(size)


def tiled(
    config: Mapping[str, Any],
    tiling: Tiling,
    normalisation: tuple[tuple[float, ...], tuple[float, ...]],
    resample: int = BICUBIC,
) -> Preprocessing:
    """Settings with a tiling; `normalisation` and `resample` are what the processor's class has by default."""
    mean, std = normalisation
    area = tiling.tile[0] * tiling.tile[1]
    return Preprocessing(
        min_pixels=area,
        max_pixels=area * max(1, tiling.max_tiles),
        mean=channels(config, "image_mean", mean),
        std=channels(config, "image_std", std),
        rescale_factor=float(config.get("rescale_factor", 1 / 255)),
        resample=int(config.get("resample", resample)),
        tiling=tiling,
    )


def stretched(settings: Preprocessing, tile: tuple[int, int]) -> Preprocessing:
    """The same, of pictures that are one tile whatever their shape: frames of a clip."""
    return replace(settings, tiling=Tiling(TilingRule.STRETCH, tile))


def channels(config: Mapping[str, Any], key: str, default: tuple[float, ...]) -> tuple[float, ...]:
    """One number for each channel."""
    values = config.get(key) or default
    return tuple(map(float, values if isinstance(values, list | tuple) else [values] * 3))


def checked(settings: Preprocessing) -> Preprocessing:
    """Raises ValueError over settings that a client could not work with."""
    numbers = (*settings.mean, *settings.std, settings.rescale_factor, *settings.crop_mean, *settings.crop_std)
    if not len(settings.mean) == len(settings.std) == 3:
        raise ValueError("image_mean and image_std are not of 3 channels")
    if not all(map(isfinite, numbers)) or min(*settings.std, *settings.crop_std, 1.0) <= 0:
        raise ValueError("image_mean, image_std and rescale_factor must be finite, image_std positive")
    tiling = settings.tiling
    filters = [settings.resample, *([tiling.crop_resample] if tiling and tiling.crop_resample is not None else [])]
    if not set(filters) <= set(_FILTERS):
        raise ValueError(f"resample {filters} is no filter of Pillow")
    if not 0 < settings.min_pixels <= settings.max_pixels < 1 << 63:
        raise ValueError(f"sizes {settings.min_pixels} and {settings.max_pixels} are no bounds")
    if tiling and (min(*tiling.tile, *(tiling.crop or (1, 1))) < 1 or not 1 <= tiling.min_tiles <= tiling.max_tiles):
        raise ValueError(f"tiles of {tiling.tile}, {tiling.min_tiles} to {tiling.max_tiles} of them, cannot be cut")
    return settings
