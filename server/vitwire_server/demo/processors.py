"""The settings of demo models' processors: transformers' defaults with the sizes of a small tower."""

from collections.abc import Mapping
from typing import Any

import transformers
from transformers.models.auto import image_processing_auto
from transformers.models.auto.auto_mappings import VIDEO_PROCESSOR_MAPPING_NAMES

from vitwire_server.demo.shrinking import PINPOINTS, Json
from vitwire_server.towers.configs import Config
from vitwire_server.towers.family import Accepts, Family
from vitwire_server.towers.layouts.packed import PackedFamily, sizes

_CLASSES: Mapping[str, Mapping[str, str]] = vars(image_processing_auto)["IMAGE_PROCESSOR_MAPPING_NAMES"]
"""Names of image processors' classes by model and by what they are written for."""
CLIP: Json = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
IMAGENET: Json = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
HALF: Json = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
STEPS: Json = {
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "rescale_factor": 1 / 255,
}
"""Steps of most processors."""
_IMAGE_TOKENS = (16, 1280)
"""Bounds of an image's tokens, as the published processors have them."""
_OF_IMAGES = ("image_processor_type", "crop_to_patches", "image_grid_pinpoints", "max_patches", "min_patches")
"""Settings that video processors do not have."""
_MARGIN = 8
"""Pixels cut off an image whose shorter side is resized to its tile's and this."""


def image_settings(model_type: str, family: Family, config: Config, written: Mapping[str, Any]) -> Json:
    """Settings of the image processor of `model_type`; `written` are those that are not derived."""
    names = _CLASSES[_listed(model_type)]
    settings = {**STEPS, "resample": 3, "image_processor_type": names["torchvision"]}
    if "pil" in names:  # without torchvision, the defaults of other classes cannot be read
        usual = getattr(transformers, names["pil"])().to_dict()
        settings = {**STEPS, **{name: value for name, value in usual.items() if value is not None}}
    settings |= written
    return {**settings, **_sized(settings, family, config), **written}


def video_settings(model_type: str, family: Family, image: Mapping[str, Any], written: Mapping[str, Any]) -> Json:
    """Settings of the video processor, which are those of images but for sizes; none if there is no such processor."""
    if _listed(model_type) not in VIDEO_PROCESSOR_MAPPING_NAMES or "video_sampling" in image:
        return {}
    bounds = family.video_areas.pixels if isinstance(family, PackedFamily) else None
    areas = _areas(*bounds) if bounds else {}
    return {**{name: value for name, value in image.items() if name not in _OF_IMAGES}, **areas, **written}


def _listed(model_type: str) -> str:
    """The model, or the one that it is a part or a variant of, by its name."""
    return max((name for name in _CLASSES if model_type.startswith(name)), key=len)


def _sized(image: Json, family: Family, config: Config) -> Json:
    """Sizes of the processor that follow from those of the tower."""
    tower = _tower(family, config)
    if isinstance(family, PackedFamily):
        size = sizes(tower)
        area = (size.patch * size.merge) ** 2
        known = {"merge_size": size.merge, "patch_size": size.patch, "temporal_patch_size": size.temporal}
        if family.images is Accepts.PIXELS:
            return {**known, "size": {"max_height": 512, "max_width": 512}, "max_patches": 16384}
        return {**known, **_areas(_IMAGE_TOKENS[0] * area, _IMAGE_TOKENS[1] * area)}
    found: Json = {}
    if "image_grid_pinpoints" in image:
        found["image_grid_pinpoints"] = PINPOINTS
    if "max_patches" in image:
        found["max_patches"] = 6
    if "patch_size" in image and hasattr(tower, "patch_size"):
        found["patch_size"] = tower.patch_size
    if hasattr(tower, "image_size"):
        side = tower.image_size if isinstance(tower.image_size, int) else tower.image_size[0]
        found |= _sides(image, side)
    return found


def _tower(family: Family, config: Config) -> Config:
    whole = config if hasattr(config, family.tower.config.partition(".")[0]) or not family.tower.config else None
    return family.tower.configuration(whole or getattr(config, "vlm_config", None) or config.encoder)


def _sides(image: Json, side: int) -> Json:
    """Of tiles of this side."""
    square, around = {"height": side, "width": side}, side + (0 if "image_grid_pinpoints" in image else _MARGIN)
    if isinstance(image.get("max_image_size"), dict):
        return {"max_image_size": {"longest_edge": side}, "size": {"longest_edge": 4 * side}}
    if image.get("do_center_crop"):
        shorter = {"height": around, "width": around} if "height" in image["size"] else {"shortest_edge": around}
        return {"crop_size": square, "size": shorter}
    return {"size": square} if "height" in image.get("size", {}) else {}


def _areas(smallest: int, largest: int) -> Json:
    return {"size": {"shortest_edge": smallest, "longest_edge": largest}}
