"""The settings of a processor that cuts tiles, or that makes one of an image: resized to it, or its middle cut out."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vitwire_server.core.models import Preprocessing
from vitwire_server.core.tilings import Overview, Tiling, TilingRule
from vitwire_server.towers.processors.settings import (
    BICUBIC,
    BILINEAR,
    CLIP,
    HALF,
    IDENTITY,
    IMAGENET,
    Normalisation,
    ProcessorFiles,
    bounded,
    per_channel,
    square,
    whole,
)

Size = tuple[int, int]
_SUFFIXES = ("ImageProcessorFast", "ImageProcessorPil", "ImageProcessor", "FeatureExtractor")
_RESIZING = (
    TilingRule.STRETCH,
    TilingRule.CENTER_CROP,
    TilingRule.STRETCHED_CROP,
    TilingRule.SQUARE,
    TilingRule.WHOLE_TILES,
)
"""Rules whose tiles are not of one size unless images are resized."""


def tiled(
    config: Mapping[str, Any], tiling: Tiling, normalisation: Normalisation, resample: int = BICUBIC
) -> Preprocessing:
    """Settings with a tiling; `normalisation` and `resample` are the defaults of the processor's class.

    Raises ValueError if the file says not to resize images, which the rule does.
    """
    if not config.get("do_resize", True) and tiling.rule in _RESIZING:  # processors take null as false
        raise ValueError(f"unsupported do_resize: {json.dumps(config['do_resize'])}")
    area = tiling.tile[0] * tiling.tile[1]
    settings = bounded(config, (area, area * max(1, tiling.max_tiles)), normalisation, resample)
    return replace(settings, tiling=tiling)


def stretched(settings: Preprocessing, tile: tuple[int, int]) -> Preprocessing:
    """The same, of pictures that are one tile whatever their shape: frames of a clip."""
    return replace(settings, tiling=Tiling(TilingRule.STRETCH, tile))


def squared(config: Mapping[str, Any], side: int, normalisation: Normalisation) -> Preprocessing:
    """Settings of a processor that fits an image into one tile in its own shape, on its mean colour."""
    tiling = Tiling(
        TilingRule.SQUARE,
        (side, side),
        background=shade(per_channel(config, "image_mean", normalisation[0])),
        min_side=whole(config, "min_size", 14),
    )
    return tiled(config, tiling, normalisation)


def fits_tower(config: Mapping[str, Any], side: int) -> None:
    """Raises ValueError if the file's size is not `side`, the side of the tower's tiles."""
    if (own := square(config, default=side)) != side:
        raise ValueError(f"size is {own}, but must be the tower's image_size, {side}")


def nearest_ratio(config: Mapping[str, Any], side: int, *, cuts: bool) -> Tiling:
    """The tiling of GOT-OCR 2's processor, which several models use; `cuts` is true if theirs cuts by default.

    Raises ValueError over tiles of another size than `side`.
    """
    fits_tower(config, side)
    if not config.get("crop_to_patches", cuts):
        return Tiling(TilingRule.STRETCH, (side, side))
    return Tiling(
        TilingRule.CLOSEST_RATIO,
        (side, side),
        overview=Overview.LAST,
        min_tiles=whole(config, "min_patches", 1),
        max_tiles=whole(config, "max_patches", 12),
    )


def shade(mean: Sequence[float]) -> tuple[int, ...]:
    """The background that becomes nearly zero when it is normalised."""
    return tuple(int(value * 255) for value in mean)


@dataclass(frozen=True, slots=True)
class ProcessorClass:
    """Defaults of a class of Hugging Face's processors."""

    normalisation: Normalisation
    resample: int
    size: Mapping[str, int]
    crops: bool = False
    """The middle of the resized image is cut out."""
    squares: bool = False
    """A size of one number is a square's side, rather than the shorter side."""
    converts: bool = False


_SHORTEST = {"shortest_edge": 224}
_SQUARE = {"height": 224, "width": 224}
CLASSES = {
    "CLIP": ProcessorClass(CLIP, BICUBIC, _SHORTEST, crops=True, converts=True),
    "ChineseCLIP": ProcessorClass(CLIP, BICUBIC, _SHORTEST, crops=True, converts=True),
    "Bit": ProcessorClass(CLIP, BICUBIC, _SHORTEST, crops=True, converts=True),
    "Siglip": ProcessorClass(HALF, BICUBIC, _SQUARE, converts=True),
    "ViT": ProcessorClass(HALF, BILINEAR, _SQUARE, squares=True),
    "DeiT": ProcessorClass(HALF, BICUBIC, {"height": 256, "width": 256}, crops=True, squares=True),
    "DINOv3ViT": ProcessorClass(IMAGENET, BILINEAR, _SQUARE, squares=True),
    "Tipsv2": ProcessorClass(IDENTITY, BILINEAR, {"height": 448, "width": 448}, squares=True, converts=True),
}
"""By the beginning of their names."""


def class_of(files: ProcessorFiles, default: str) -> ProcessorClass:
    """The class that a processor's file names, or else `default`. Raises ValueError over one that is not known here."""
    named = files.image.get("image_processor_type") or files.image.get("feature_extractor_type")
    if not named:
        return CLASSES[default]
    stem = next((str(named).removesuffix(suffix) for suffix in _SUFFIXES if str(named).endswith(suffix)), "")
    if stem not in CLASSES:
        known = ", ".join(f"{name}ImageProcessor" for name in CLASSES)
        raise ValueError(f"unsupported image_processor_type {named!r}; supported: {known}")
    return CLASSES[stem]


def one_tile(files: ProcessorFiles, default: str) -> Preprocessing:
    """Settings of images, and of frames of clips. Raises ValueError over steps that do not end in one tile."""
    own = class_of(files, default)
    image = {key: value for key, value in files.image.items() if value is not None or key.startswith("do_")}
    for step in ("do_resize", "do_rescale"):
        if not image.get(step, True):  # processors take null as false
            raise ValueError(f"unsupported {step}: {json.dumps(image[step])}")
    normalisation = own.normalisation
    if not image.get("do_normalize", True):
        image, normalisation = {**image, "image_mean": None, "image_std": None}, IDENTITY
    return tiled(image, _tiling(image, own), normalisation, own.resample)


def tile_of(config: Mapping[str, Any], side: int, normalisation: Normalisation, *, crops: bool = True) -> Preprocessing:
    """Settings of a processor that makes one square tile of an image, of the side that a tower takes.

    `normalisation` and `crops`, whether the middle is cut out, are the defaults of its class. Raises ValueError over
    tiles of another size.
    """
    own = ProcessorClass(normalisation, BICUBIC, {"shortest_edge": side}, crops=crops)
    tiling = _tiling({"crop_size": side, **config}, own)
    if tiling.tile != (side, side):
        size, cut = config.get("size"), config.get("crop_size")
        raise ValueError(f"size {size} with crop_size {cut} does not make tiles of {side} x {side}")
    return tiled(config, tiling, normalisation)


def _tiling(image: Mapping[str, Any], own: ProcessorClass) -> Tiling:
    size = image.get("size", own.size)
    if not isinstance(size, dict):
        size = {"height": size, "width": size} if own.squares else {"shortest_edge": size}
    stretched: Size | None = None
    if "height" in size:
        height, width = _sides(size, "size")
        stretched = (height, width)
    cut = _crop(image) if image.get("do_center_crop", own.crops) else None
    if stretched and cut in (None, stretched):
        return Tiling(TilingRule.STRETCH, stretched)
    oblong = stretched is not None and stretched[0] != stretched[1]
    if cut is None or oblong or not (stretched or size.keys() == {"shortest_edge"}):
        raise ValueError(f"size {dict(size)} with crop_size {cut} does not make one tile of an image")
    if stretched:
        rule, shorter = TilingRule.STRETCHED_CROP, stretched[0]
    else:
        rule, (shorter,) = TilingRule.CENTER_CROP, _sides(size, "size", ("shortest_edge",))
    if max(cut) > shorter:
        raise ValueError(f"crop_size {cut} is larger than size {dict(size)}")
    return Tiling(rule, cut, min_side=shorter)


def _crop(image: Mapping[str, Any]) -> Size:
    crop = image.get("crop_size", 224)
    height, width = _sides(crop if isinstance(crop, dict) else {"height": crop, "width": crop}, "crop_size")
    return height, width


def _sides(size: Mapping[str, Any], name: str, sides: Sequence[str] = ("height", "width")) -> tuple[int, ...]:
    """Raises ValueError over a side that is missing, no number or not positive, by its name in the file."""
    found = tuple(whole({f"{name}.{side}": size.get(side)}, f"{name}.{side}") for side in sides)
    if min(found) < 1:
        raise ValueError(f"{name} is {dict(size)}, but its sides must be positive")
    return found
