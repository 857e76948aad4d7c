"""All that decides how pictures and files of one modality are prepared."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

from vitwire_server.core.items import Areas, Modality
from vitwire_server.core.models import Geometry, Preprocessing, Resizing
from vitwire_server.core.sampling import Sampling, SamplingRule


@dataclass(frozen=True, slots=True)
class Recipe:
    """The settings of the model's processor, and how its tower wants patches."""

    settings: Preprocessing
    patch: int
    merge: int
    temporal: int
    """Frames of a patch."""
    raster: bool = False
    """True if patches are ordered row by row of the frame, rather than token by token."""
    channels_last: bool = False
    """True if the columns of a patch are (p, p, C), rather than (C, T, p, p)."""
    size: tuple[int, int] | None = None  # height and width of resized frames, if the settings do not decide

    @classmethod
    def of(cls, settings: Preprocessing, geometry: Geometry) -> Self:
        """The recipe of a modality."""
        return cls(settings, geometry.patch, geometry.merge, geometry.temporal, geometry.raster, geometry.channels_last)

    def within(self, areas: Areas | None) -> Self:
        """The recipe with these bounds of areas; itself with None."""
        if areas is None:
            return self
        return replace(self, settings=replace(self.settings, min_pixels=areas[0], max_pixels=areas[1]))

    def taking(self, frames: tuple[int, ...]) -> Self:
        """The recipe with these frames in place of its rule for clips; itself without any."""
        if not frames:
            return self
        return replace(self, settings=replace(self.settings, sampling=Sampling(SamplingRule.GIVEN, given=frames)))

    @property
    def factor(self) -> int:
        """Side of one token in pixels; resized frames are multiples of it."""
        return self.patch * self.merge


def recipes_of(preprocessing: Mapping[Modality, Preprocessing], geometry: Geometry) -> dict[Modality, Recipe]:
    """The recipe of each modality that is prepared; others come as a processor returns them."""
    return {
        modality: Recipe.of(settings, geometry)
        for modality, settings in preprocessing.items()
        if settings.resizing is not Resizing.OTHER
    }


def affine(settings: Preprocessing) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Scale and offset of each channel: `x * rescale / std - mean / std`."""
    scale = tuple(settings.rescale_factor / std for std in settings.std)
    offset = tuple(-mean / std for mean, std in zip(settings.mean, settings.std, strict=True))
    return scale, offset
