"""LLaVA-NeXT and LLaVA-OneVision."""

from typing import Any

from torch import Tensor

from vitwire_server.core.items import Modality
from vitwire_server.core.models import Preprocessing
from vitwire_server.core.tilings import Overview, Tiling, TilingRule
from vitwire_server.towers.configs import Config
from vitwire_server.towers.family import Accepts, Family, Module, Parts, in_model
from vitwire_server.towers.layouts.tiles import Encoder, TileFamily, TileShape, heads_of
from vitwire_server.towers.processors.settings import CLIP, ProcessorFiles
from vitwire_server.towers.processors.tiles import stretched, tiled
from vitwire_server.towers.shared.clip import LayerRows, clip
from vitwire_server.towers.shared.siglip import siglip


def _best_fit(files: ProcessorFiles, config: Config) -> Tiling:
    """The whole image, then its tiles in one of the listed layouts."""
    size = config.vision_config.image_size
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


def _next_settings(files: ProcessorFiles, config: Config) -> dict[Modality, Preprocessing]:
    return {Modality.IMAGE: tiled(files.image, _best_fit(files, config), CLIP)}


def _onevision_settings(files: ProcessorFiles, config: Config) -> dict[Modality, Preprocessing]:
    tiling = _best_fit(files, config)
    frames = tiled(files.video, tiling, CLIP)
    return {Modality.IMAGE: tiled(files.image, tiling, CLIP), Modality.VIDEO: stretched(frames, tiling.tile)}


class Llava(Encoder):
    """Rows of CLIP's or SigLIP's chosen layers, and a projector of every row.

    The strategy `default` leaves out the first row of a tile, which is CLIP's class token, and on SigLIP a patch.
    """

    def __init__(self, parts: Parts, config: Config) -> None:
        vision = config.vision_config
        self._tower: Any = parts["tower"]
        self._rows = LayerRows(self._tower, config.vision_feature_layer)
        self._left_out = int(getattr(config, "vision_feature_select_strategy", "default") == "default")
        self._projector = parts["projector"]
        self.blocks = self._rows.blocks
        self.patch, self.merge = vision.patch_size, 1
        rows = self._tower.embeddings.position_embedding.num_embeddings
        self.tile = TileShape(vision.image_size, vision.image_size, rows - self._left_out)
        self.channels = vision.num_channels
        self.width = config.text_config.hidden_size
        self.attention_heads = heads_of(vision)

    def encode(self, tiles: Tensor) -> Tensor:
        return self._projector(self._rows(tiles)[:, self._left_out :])  # type: ignore[no-any-return]


def _projector(source: str) -> dict[str, Module]:
    return {"projector": Module(source=source, prefixes=in_model("multi_modal_projector."), config="")}


_LLAVA_NEXT = TileFamily(
    model_type="llava_next",
    title="LLaVA-NeXT",
    architecture="24 x 1024, patch 14",
    tower=clip("vision_tower."),
    beside=_projector("llava_next.modeling_llava_next:LlavaNextMultiModalProjector"),
    encoder=Llava,
    processor=_next_settings,
    videos=Accepts.NOTHING,
    special="rows of every tile, whole image first; unpadding and line breaks stay with the LLM",
)

_LLAVA_ONEVISION = TileFamily(
    model_type="llava_onevision",
    title="LLaVA-OneVision",
    architecture="26 x 1152, patch 14",
    tower=siglip("vision_tower."),
    beside=_projector("llava_onevision.modeling_llava_onevision:LlavaOnevisionMultiModalProjector"),
    encoder=Llava,
    processor=_onevision_settings,
    special="rows of every tile, whole image first; unpadding, line breaks and pooling of frames stay with the LLM",
)

ROWS: tuple[Family, ...] = (_LLAVA_NEXT, _LLAVA_ONEVISION)
