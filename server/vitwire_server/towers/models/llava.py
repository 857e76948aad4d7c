"""LLaVA 1.5, ViP-LLaVA, LLaVA-NeXT and LLaVA-OneVision, with CLIP's tower or SigLIP's."""

from dataclasses import replace

from vitwire_server.core.items import Modality
from vitwire_server.core.models import Preprocessing, Resizing
from vitwire_server.core.tilings import Overview, Tiling, TilingRule
from vitwire_server.towers.configs import Config
from vitwire_server.towers.family import Accepts, Family, projector
from vitwire_server.towers.layouts.tiles import TileFamily
from vitwire_server.towers.processors.settings import CLIP, HALF, ProcessorFiles, square
from vitwire_server.towers.processors.tiles import fits_tower, one_tile, stretched, tiled
from vitwire_server.towers.shared.clip import clip
from vitwire_server.towers.shared.projected import ProjectedLayers
from vitwire_server.towers.shared.siglip import siglip


def _settings(files: ProcessorFiles, config: Config) -> dict[Modality, Preprocessing]:
    """CLIP's processor cuts out the middle unless its file says otherwise, SigLIP's has no such setting."""
    stretches = "Siglip" in (files.image.get("image_processor_type") or "")
    side, normalisation = config.vision_config.image_size, HALF if stretches else CLIP
    settings = one_tile(files.image, side, normalisation, crops=not stretches)
    # Pads images to squares before it resizes them, which no rule does.
    return {Modality.IMAGE: replace(settings, resizing=Resizing.OTHER) if files.image.get("do_pad") else settings}


def _best_fit(files: ProcessorFiles, config: Config) -> Tiling:
    """The whole image, then its tiles in one of the listed layouts."""
    size = config.vision_config.image_size
    fits_tower(files.image, size)
    pinpoints = files.image.get("image_grid_pinpoints") or config.image_grid_pinpoints
    if any(length % size for pair in pinpoints for length in pair):
        raise ValueError(f"image_grid_pinpoints must be multiples of {size}")
    layouts = tuple((int(height) // size, int(width) // size) for height, width in pinpoints)
    return Tiling(
        TilingRule.BEST_FIT,
        (size, size),
        overview=Overview.FIRST,
        max_tiles=max(rows * columns for rows, columns in layouts),
        layouts=layouts,
    )


def next_settings(files: ProcessorFiles, config: Config) -> dict[Modality, Preprocessing]:
    """Of images. Raises ValueError over tiles of another size than the tower takes."""
    side = config.vision_config.image_size
    if (cut := square(files.image, "crop_size", side)) != side:
        raise ValueError(f"crop_size must be image_size, {side}, but is {cut}")
    return {Modality.IMAGE: tiled(files.image, _best_fit(files, config), CLIP)}


def _onevision_settings(files: ProcessorFiles, config: Config) -> dict[Modality, Preprocessing]:
    tiling = _best_fit(files, config)
    frames = tiled(files.video, tiling, CLIP)
    return {Modality.IMAGE: tiled(files.image, tiling, CLIP), Modality.VIDEO: stretched(frames, tiling.tile)}


_LLAVA = TileFamily(
    model_type="llava",
    title="LLaVA 1.5",
    architecture="24 x 1024, patch 14",
    tower=clip("vision_tower."),
    beside=projector("llava.modeling_llava:LlavaMultiModalProjector"),
    encoder=ProjectedLayers,
    processor=_settings,
    videos=Accepts.NOTHING,
)

_LLAVA_SIGLIP = replace(
    _LLAVA,
    tower_type="siglip_vision_model",
    title="LLaVA with SigLIP",
    architecture="26 x 1152, patch 14",
    tower=siglip("vision_tower."),
)

_VIPLLAVA = replace(
    _LLAVA,
    model_type="vipllava",
    title="ViP-LLaVA",
    beside=projector("vipllava.modeling_vipllava:VipLlavaMultiModalProjector"),
    transformers="5.23.0",
    special="rows of five layers side by side",
)

_LLAVA_NEXT = TileFamily(
    model_type="llava_next",
    title="LLaVA-NeXT",
    architecture="24 x 1024, patch 14",
    tower=clip("vision_tower."),
    beside=projector("llava_next.modeling_llava_next:LlavaNextMultiModalProjector"),
    encoder=ProjectedLayers,
    processor=next_settings,
    videos=Accepts.NOTHING,
    special="rows of every tile, whole image first; unpadding and line breaks stay with the LLM",
)

_LLAVA_NEXT_SIGLIP = replace(
    _LLAVA_NEXT,
    tower_type="siglip_vision_model",
    title="LLaVA-NeXT with SigLIP, Granite Vision",
    architecture="27 x 1152, patch 14",
    tower=siglip("vision_tower."),
    special="rows of every tile, of several layers where the configuration lists them",
)

_LLAVA_ONEVISION = TileFamily(
    model_type="llava_onevision",
    title="LLaVA-OneVision",
    architecture="26 x 1152, patch 14",
    tower=siglip("vision_tower."),
    beside=projector("llava_onevision.modeling_llava_onevision:LlavaOnevisionMultiModalProjector"),
    encoder=ProjectedLayers,
    processor=_onevision_settings,
    special="rows of every tile, whole image first; unpadding, line breaks and pooling of frames stay with the LLM",
)

ROWS: tuple[Family, ...] = (_LLAVA, _LLAVA_SIGLIP, _VIPLLAVA, _LLAVA_NEXT, _LLAVA_NEXT_SIGLIP, _LLAVA_ONEVISION)
