"""Eagle 2.5 (NVIDIA), in the layout that its authors publish."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from vitwire_server.core.items import Modality
from vitwire_server.core.models import Preprocessing
from vitwire_server.core.tilings import Overview, Tiling, TilingRule
from vitwire_server.towers.configs import Config, changed, dtype_of
from vitwire_server.towers.family import Accepts, Family, Module
from vitwire_server.towers.layouts.tiles import TileFamily
from vitwire_server.towers.processors.settings import HALF, ProcessorFiles, whole
from vitwire_server.towers.processors.tiles import fits_tower, tiled
from vitwire_server.towers.served import Served
from vitwire_server.towers.shared.pixel_shuffle import MLP1, SHUFFLED, shuffled, shuffles
from vitwire_server.towers.shared.siglip import Siglip, siglip, siglip_config


def _settings(files: ProcessorFiles, config: Config) -> dict[Modality, Preprocessing]:
    image = files.image
    if image.get("pad_during_tiling"):
        raise ValueError("pad_during_tiling is not served")
    fits_tower(image, config.vision_config.image_size)
    tiling = Tiling(
        TilingRule.RATIO_AND_AREA,
        (config.vision_config.image_size,) * 2,
        overview=Overview.LAST if image.get("use_thumbnail", True) else Overview.NONE,
        min_tiles=whole(image, "min_dynamic_tiles", 1),
        max_tiles=whole(image, "max_dynamic_tiles", 12),
    )
    return {Modality.IMAGE: tiled(image, tiling, HALF)}


class Eagle(Siglip):
    """Pixel shuffle before the projector."""

    def _merge(self, config: Config, side: int) -> int:
        merge: int = round(1 / config.downsample_ratio)
        if side % merge:
            raise ValueError(f"image_size / patch_size is {side}, but must be a multiple of {merge} (downsample_ratio)")
        return merge

    def encode(self, tiles: Tensor) -> Tensor:
        patches = self._tower(pixel_values=tiles).last_hidden_state
        return self._projector(shuffled(patches, self.merge))  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True)
class EagleFamily(TileFamily):
    """Checkpoints whose config.json has InternVL's fields around a SigLIP tower."""

    def read_config(self, folder: Path, settings: Mapping[str, Any]) -> Config:
        """See Family. Raises ValueError over another tower."""
        del folder
        vision = dict(settings["vision_config"])
        if vision.get("model_type") != "siglip_vision_model":
            raise ValueError(f"vision_config.model_type is {vision.get('model_type')!r}, only SigLIP's is served")
        config = siglip_config(
            {**vision, "image_size": settings.get("force_image_size") or vision["image_size"]},
            width=settings["text_config"]["hidden_size"],
            dtype=dtype_of(settings),
        )
        return changed(
            config,
            {
                "downsample_ratio": settings.get("downsample_ratio", 0.5),
                "projector_hidden_act": "gelu",
                "vision_feature_layer": settings.get("select_layer", -4),
            },
        )


_EAGLE2_5 = EagleFamily(
    model_type="eagle_2_5_vl",
    title="Eagle 2.5",
    architecture="27 x 1152, patch 14",
    tower=siglip("vision_model."),
    beside={
        "projector": Module(
            source="internvl.modeling_internvl:InternVLMultiModalProjector",
            prefixes=MLP1,
            config="",
            served=(Served("downsample_ratio", shuffles, SHUFFLED),),
        )
    },
    encoder=Eagle,
    processor=_settings,
    videos=Accepts.NOTHING,
    special="NVIDIA's layout; frames of clips are images of one tile",
)

ROWS: tuple[Family, ...] = (_EAGLE2_5,)
