"""The settings of a checkpoint's Hugging Face processor, read from its files without building it."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

from vitwire_server.core.items import Modality
from vitwire_server.core.models import Preprocessing, Resizing
from vitwire_server.core.tilings import Tiling
from vitwire_server.towers.configs import Config
from vitwire_server.towers.files import CheckpointError, optional_json

LANCZOS, BILINEAR, BICUBIC = 1, 2, 3
_FILTERS = range(6)
"""Pillow's numbers of its filters."""

Number = TypeVar("Number", int, float)
Normalisation = tuple[tuple[float, ...], tuple[float, ...]]
"""Mean and standard deviation of each channel."""
IDENTITY = ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


@dataclass(frozen=True, slots=True)
class ProcessorFiles:
    """Keys of a processor's files for images and for videos."""

    image: Mapping[str, Any]
    own_video: Mapping[str, Any]
    """Keys of the videos' file alone."""
    image_path: Path
    """The file that holds the keys for images, or would hold them."""
    video_path: Path

    @property
    def video(self) -> Mapping[str, Any]:
        """Keys for videos; a key that the videos' file lacks is taken from images."""
        return {**self.image, **self.own_video}

    @property
    def sampling(self) -> Mapping[str, Any]:
        """Keys for the choice of frames; SmolVLM keeps them in the images' file if the videos' file is missing."""
        return self.own_video or {"video_sampling": self.image.get("video_sampling")}

    def square(self, key: str = "size", default: int | None = None) -> int:
        """The side of a square size of images. Raises CheckpointError."""
        with usable(self.image_path):
            return square(self.image, key, default)

    @classmethod
    def read(cls, folder: Path, *, required: bool = False) -> "ProcessorFiles":
        """Newer checkpoints keep all in processor_config.json. `required` says that there must be a file for images.

        Raises CheckpointError.
        """
        path = folder / "processor_config.json"
        nested = optional_json(path)
        if not all(isinstance(nested.get(key, {}), dict) for key in ("image_processor", "video_processor")):
            raise CheckpointError(f"{path} holds no settings of processors")
        own_image, own_video = (nested.get(key) for key in ("image_processor", "video_processor"))
        image_path = path if own_image else folder / "preprocessor_config.json"
        video_path = path if own_video else folder / "video_preprocessor_config.json"
        if required and not own_image and not image_path.exists():
            advice = "add the model's file, as its images would be prepared with guessed values"
            raise CheckpointError(f"{folder} holds no {image_path.name}, nor image_processor in {path.name}: {advice}")
        image = own_image or optional_json(image_path)
        return cls(image, own_video or optional_json(video_path), image_path, video_path)


@contextmanager
def usable(path: Path) -> Iterator[None]:
    """Raises CheckpointError, which names `path`, over values of a processor's file that cannot be used."""
    try:
        yield
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise CheckpointError(f"{path}: the processor's settings cannot be used: {reason}") from error


ReadProcessor = Callable[[ProcessorFiles, Config], dict[Modality, Preprocessing]]
"""From a processor's files and the checkpoint's configuration to settings; may raise what `read_settings` catches."""


def read_settings(
    folder: Path,
    settings: Callable[[ProcessorFiles], Mapping[Modality, Preprocessing]],
    *,
    channels: int = 3,
    in_code: bool = False,
    converts: bool = True,
) -> dict[Modality, Preprocessing]:
    """Settings of each modality, which `settings` makes of a checkpoint's files. Raises CheckpointError.

    `settings` may raise KeyError, TypeError, ValueError or ArithmeticError over values that no client can use.
    Unless they are `in_code`, a checkpoint without a file for images is refused. `converts` is true if the processor's
    class converts images to RGB when its files do not say.
    """
    files = ProcessorFiles.read(folder, required=not in_code)
    with usable(folder):
        found = {modality: _checked(own, channels) for modality, own in settings(files).items()}
    said = files.image.get("do_convert_rgb")  # null leaves it to the class, too
    drops = not (converts if said is None else said)
    return found | {Modality.IMAGE: replace(found[Modality.IMAGE], drops_transparency=drops)}


def bounded(
    config: Mapping[str, Any], areas: tuple[int, int], normalisation: Normalisation, resample: int = BICUBIC
) -> Preprocessing:
    """Settings of images of such areas; `normalisation` and `resample` are the defaults of the processor's class."""
    (smallest, largest), (mean, std) = areas, normalised(config, normalisation)
    return Preprocessing(
        min_pixels=smallest,
        max_pixels=largest,
        mean=mean,
        std=std,
        rescale_factor=rescale_factor(config),
        resample=whole(config, "resample", resample),
    )


def images(settings: Callable[[Mapping[str, Any], Config], Preprocessing]) -> ReadProcessor:
    """A processor of images alone, by what `settings` makes of its keys for images."""
    return lambda files, config: {Modality.IMAGE: settings(files.image, config)}


def unsized(config: Mapping[str, Any], normalisation: Normalisation, resample: int = BICUBIC) -> Preprocessing:
    """Settings of images that the model's own processor sizes by a rule of its own, so that clients send pixels."""
    return replace(bounded(config, (1, 1), normalisation, resample), resizing=Resizing.OTHER)


def bounded_above(
    config: Mapping[str, Any],
    most: int,
    factor: int,
    resizing: Resizing,
    normalisation: Normalisation,
    resample: int = BICUBIC,
) -> Preprocessing:
    """Settings of images of at most `most` pixels whose sides are multiples of `factor`."""
    config = {"do_normalize": normalisation is not IDENTITY, **config}
    return replace(bounded(config, (factor**2, most), normalisation, resample), resizing=resizing)


@dataclass(frozen=True, slots=True)
class AreaRule:
    """The settings of one modality that a checkpoint's files leave open."""

    pixels: tuple[int, int] | None = None
    """Area bounds if the files give none."""
    spans_frames: bool = False
    """The area bounds count all frames together, an image's repeated ones included."""
    resizing: Resizing = Resizing.AREA


def read_areas(
    folder: Path, rules: Mapping[Modality, AreaRule], *, channels: int, converts: bool
) -> dict[Modality, Preprocessing]:
    """Settings of each modality whose pictures are resized within bounds of their areas. Raises CheckpointError.

    A checkpoint without settings for videos takes the images', with the area bounds of the rule.
    """

    def settings(files: ProcessorFiles) -> dict[Modality, Preprocessing]:
        unbounded = {**files.image, "min_pixels": None, "max_pixels": None, "size": None}
        found = {Modality.IMAGE: files.image, Modality.VIDEO: {**unbounded, **files.own_video}}
        return {modality: _of_area(found[modality], rule) for modality, rule in rules.items()}

    return read_settings(folder, settings, channels=channels, converts=converts)


def _of_area(config: Mapping[str, Any], rule: AreaRule) -> Preprocessing:
    """May raise what `read_settings` catches."""
    own = config.get("media_proc_cfg") or config
    settings = bounded(own, areas(own, rule), (own["image_mean"], own["image_std"]))
    return replace(settings, bounds_span_frames=rule.spans_frames, resizing=rule.resizing)


def areas(config: Mapping[str, Any], rule: AreaRule) -> tuple[int, int]:
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


def normalised(config: Mapping[str, Any], default: Normalisation, prefix: str = "image") -> Normalisation:
    """Mean and standard deviation of each channel, by keys of this prefix, unless values are not normalised."""
    if not config.get("do_normalize", True):
        return IDENTITY
    return per_channel(config, f"{prefix}_mean", default[0]), per_channel(config, f"{prefix}_std", default[1])


def whole(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A whole number. Raises ValueError that names the key."""
    return _converted(int, key, config.get(key, default))


def rescale_factor(config: Mapping[str, Any]) -> float:
    """The factor of pixels' values: 1 if they are not rescaled."""
    key = "rescale_factor"
    return _converted(float, key, config.get(key, 1 / 255)) if config.get("do_rescale", True) else 1.0


def _converted(kind: Callable[[Any], Number], key: str, value: object) -> Number:
    try:
        return kind(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{key} is {value!r}, but must be a number") from None


def per_channel(config: Mapping[str, Any], key: str, default: tuple[float, ...]) -> tuple[float, ...]:
    """One number for each channel."""
    values = config.get(key) or default
    listed = values if isinstance(values, list | tuple) else [values] * 3
    return tuple(_converted(float, key, value) for value in listed)


def square(config: Mapping[str, Any], key: str = "size", default: int | None = None) -> int:
    """The side of a square size, in any of the forms that processors write it in."""
    size = config.get(key, default)
    if size is None:
        raise KeyError(key)
    if isinstance(size, dict):
        height = size.get("height", size.get("shortest_edge", size.get("longest_edge")))
        width = size.get("width", height)
        if height is None or height != width:
            raise ValueError(f"{key} {size} is not square")
        size = height
    return _converted(int, key, size)


def _checked(settings: Preprocessing, channels: int) -> Preprocessing:
    """Raises ValueError over settings that a client could not work with."""
    numbers = (*settings.mean, *settings.std, settings.rescale_factor, *settings.crop_mean, *settings.crop_std)
    if not len(settings.mean) == len(settings.std) == channels:
        raise ValueError(f"image_mean and image_std are not of {channels} channels")
    if not all(map(isfinite, numbers)) or min(*settings.std, *settings.crop_std, 1.0) <= 0:
        raise ValueError("image_mean, image_std and rescale_factor must be finite, image_std positive")
    if settings.resample not in _FILTERS:
        raise ValueError(f"resample {settings.resample} is not a filter of Pillow")
    if not 0 < settings.min_pixels <= settings.max_pixels < 1 << 63:
        found = f"min_pixels {settings.min_pixels} and max_pixels {settings.max_pixels}"
        raise ValueError(f"{found} must satisfy 0 < min_pixels <= max_pixels < 2**63")
    if settings.tiling:
        _check_tiling(settings.tiling)
    return settings


def _check_tiling(tiling: Tiling) -> None:
    """Raises ValueError over a tiling that cannot be done."""
    if tiling.crop_resample is not None and tiling.crop_resample not in _FILTERS:
        raise ValueError(f"resample {tiling.crop_resample} is not a filter of Pillow")
    if min(*tiling.tile, *(tiling.crop or (1, 1))) < 1 or not 1 <= tiling.min_tiles <= tiling.max_tiles:
        raise ValueError(f"tiles of {tiling.tile}, {tiling.min_tiles} to {tiling.max_tiles} of them, cannot be cut")
