"""LLaVA-OneVision."""

from torch import Tensor

from vitwire_server.core.items import Modality
from vitwire_server.core.models import Preprocessing
from vitwire_server.core.tilings import Overview, Tiling, TilingRule
from vitwire_server.towers.configs import Config
from vitwire_server.towers.family import Family, Module, Parts, in_model
from vitwire_server.towers.layouts.tiles import TileFamily
from vitwire_server.towers.processors.settings import CLIP, ProcessorFiles
from vitwire_server.towers.processors.tiles import stretched, tiled
from vitwire_server.towers.shared.siglip import Siglip, siglip


def _onevision_settings(files: ProcessorFiles, config: Config) -> dict[Modality, Preprocessing]:
    size = config.vision_config.image_size
    pinpoints = files.image.get("image_grid_pinpoints") or config.image_grid_pinpoints
    if any(length % size for pair in pinpoints for length in pair):
        raise ValueError(f"image_grid_pinpoints must be multiples of {size}")
    layouts = tuple((int(height) // size, int(width) // size) for height, width in pinpoints)
    tiling = Tiling(
        TilingRule.BEST_FIT,
        (size, size),
        overview=Overview.FIRST,
        max_tiles=max(rows * columns for rows, columns in layouts),
        layouts=layouts,
    )
    frames = tiled(files.video, tiling, CLIP)
    return {Modality.IMAGE: tiled(files.image, tiling, CLIP), Modality.VIDEO: stretched(frames, tiling.tile)}


def _left_out(config: Config) -> int:
    """Rows that the strategy leaves out: `default` the first of a tile, which is a class token in other towers."""
    return int(config.vision_feature_select_strategy == "default")


class LlavaOnevision(Siglip):
    """As published: rows of SigLIP's last layer before its final norm."""

    def __init__(self, parts: Parts, config: Config) -> None:
        super().__init__(parts, config)
        self._left_out = _left_out(config)

    def _tokens(self, config: Config, merged: int) -> int:
        return merged - _left_out(config)

    def encode(self, tiles: Tensor) -> Tensor:
        patches = self._tower.encoder(inputs_embeds=self._tower.embeddings(tiles)).last_hidden_state
        return self._projector(patches[:, self._left_out :])  # type: ignore[no-any-return]


_LLAVA_ONEVISION = TileFamily(
    model_type="llava_onevision",
    title="LLaVA-OneVision",
    architecture="26 x 1152, patch 14",
    tower=siglip("vision_tower."),
    beside={
        "projector": Module(
            source="llava_onevision.modeling_llava_onevision:LlavaOnevisionMultiModalProjector",
            prefixes=in_model("multi_modal_projector."),
            config="",
        )
    },
    encoder=LlavaOnevision,
    processor=_onevision_settings,
    special="rows of every tile, whole image first; unpadding, line breaks and pooling of frames stay with the LLM",
)

ROWS: tuple[Family, ...] = (_LLAVA_ONEVISION,)
