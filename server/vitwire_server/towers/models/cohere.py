"""Aya Vision, Command A Vision, and Compass, whose tower is Qwen3-VL's (Cohere)."""

from dataclasses import replace

from vitwire_server.core.items import Modality
from vitwire_server.core.models import Preprocessing
from vitwire_server.core.tilings import Overview, Tiling, TilingRule
from vitwire_server.towers.configs import Config
from vitwire_server.towers.family import Accepts, Family, Module, in_model
from vitwire_server.towers.layouts.tiles import TileFamily
from vitwire_server.towers.models.qwen import QWEN3_VL
from vitwire_server.towers.processors.settings import CLIP, ProcessorFiles, whole
from vitwire_server.towers.processors.tiles import fits_tower, nearest_ratio, tiled
from vitwire_server.towers.served import Served
from vitwire_server.towers.shared.projected import ProjectedLayers
from vitwire_server.towers.shared.siglip import Siglip, siglip


def _aya_settings(files: ProcessorFiles, config: Config) -> dict[Modality, Preprocessing]:
    tiling = nearest_ratio(files.image, config.vision_config.image_size, cuts=True)
    return {Modality.IMAGE: tiled(files.image, tiling, CLIP)}


def _command_settings(files: ProcessorFiles, config: Config) -> dict[Modality, Preprocessing]:
    tile = (config.vision_config.image_size,) * 2
    fits_tower(files.image, tile[0])
    most = whole(files.image, "max_patches", 12) if files.image.get("crop_to_patches", True) else 1
    tiling = Tiling(TilingRule.LEAST_SCALING, tile, overview=Overview.LAST, max_tiles=most)
    return {Modality.IMAGE: tiled(files.image, tiling, CLIP)}


def _divides(factor: int, config: Config) -> bool:
    """Whether the patches of a tile are whole squares of `factor`."""
    vision = config.vision_config
    side: int = vision.image_size // vision.patch_size
    return side % factor == 0


def _projector(source: str) -> dict[str, Module]:
    accepted = "a divisor of image_size / patch_size"
    prefixes, served = in_model("multi_modal_projector."), (Served("downsample_factor", _divides, accepted),)
    return {"projector": Module(source=source, prefixes=prefixes, config="", served=served)}


class CommandVision(Siglip):
    """The projector makes one row of a square of patches."""

    def _merge(self, config: Config, side: int) -> int:
        del side
        factor: int = config.downsample_factor
        return factor


_AYA = TileFamily(
    model_type="aya_vision",
    title="Aya Vision",
    architecture="27 x 1152, patch 14",
    tower=siglip("vision_tower."),
    beside=_projector("aya_vision.modeling_aya_vision:AyaVisionMultiModalProjector"),
    encoder=ProjectedLayers,
    processor=_aya_settings,
    videos=Accepts.NOTHING,
)

_COMMAND = TileFamily(
    model_type="cohere2_vision",
    title="Command A Vision",
    architecture="27 x 1152, patch 16",
    tower=siglip("vision_tower."),
    beside=_projector("cohere2_vision.modeling_cohere2_vision:Cohere2VisionMultiModalProjector"),
    encoder=CommandVision,
    processor=_command_settings,
    videos=Accepts.NOTHING,
)

_COMPASS = replace(
    QWEN3_VL,
    model_type="cohere_compass",
    title="Cohere Compass",
    tower=replace(QWEN3_VL.tower, source="cohere_compass.modeling_cohere_compass:CohereCompassVisionModel"),
    transformers="5.23.0",
)

ROWS: tuple[Family, ...] = (_AYA, _COMMAND, _COMPASS)
