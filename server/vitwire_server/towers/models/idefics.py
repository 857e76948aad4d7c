"""Idefics 3 and SmolVLM (Hugging Face), and retrieval models with their connector: ModernVBERT (Illuin), UltraVBERT."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from vitwire_server.core.items import Modality
from vitwire_server.core.models import Preprocessing, Resizing
from vitwire_server.core.tilings import Overview, Tiling, TilingRule
from vitwire_server.towers.configs import Config
from vitwire_server.towers.family import Accepts, Family, Module, Parts, in_model
from vitwire_server.towers.layouts.tiles import Encoder, TileFamily, heads_of, merged_tile, side
from vitwire_server.towers.processors.settings import HALF, LANCZOS, ProcessorFiles, bounded, square, whole
from vitwire_server.towers.processors.tiles import tiled
from vitwire_server.towers.served import Served
from vitwire_server.towers.shared.fractions import fractional_positions
from vitwire_server.towers.shared.modules import Constants
from vitwire_server.towers.shared.siglip import Siglip, siglip

_TILE, _LONGEST = 364, 4 * 364
"""Sizes where a checkpoint's files give none."""
_LARGEST = 4096
"""The processor bounds images to this side after resizing them, which is served only where that changes nothing."""


def _tiling(files: Mapping[str, Any], size: Mapping[str, Any], config: Config, *, cut: bool) -> Tiling:
    """Raises ValueError over sizes that are not served."""
    tile, own = side(config.vision_config.image_size), square(files, "max_image_size", _TILE)
    if own != tile:
        raise ValueError(f"max_image_size is {own}, but must be the tower's image_size, {tile}")
    longest = size.get("longest_edge") if isinstance(size, Mapping) else None
    if not isinstance(longest, int) or not 1 <= longest <= _LARGEST:
        raise ValueError(f"size.longest_edge is {longest!r}, but must be from 1 to {_LARGEST}")
    return Tiling(
        TilingRule.WHOLE_TILES,
        (tile, tile),
        overview=Overview.LAST if cut else Overview.NONE,
        max_tiles=(-(-longest // tile)) ** 2 if cut else 1,
        max_side=longest,
    )


def _images(files: ProcessorFiles, config: Config) -> dict[Modality, Preprocessing]:
    image = files.image
    size = image.get("size") or {"longest_edge": _LONGEST}
    tiling = _tiling(image, size, config, cut=bool(image.get("do_image_splitting", True)))
    return {Modality.IMAGE: tiled(image, tiling, HALF, LANCZOS)}


def _images_and_clips(files: ProcessorFiles, config: Config) -> dict[Modality, Preprocessing]:
    """Frames are never cut. A size for frames under `video_sampling` counts only where the file has no `size`."""
    video = files.own_video or files.image
    sampled = (video.get("video_sampling") or {}).get("video_size")
    size = dict(video.get("size") or sampled or {"longest_edge": _LONGEST})
    size["longest_edge"] = min(whole(size, "longest_edge", 0), _LARGEST)
    tiling = _tiling(files.video, size, config, cut=False)
    return {**_images(files, config), Modality.VIDEO: tiled(files.video, tiling, HALF, LANCZOS)}


def _capped_images(files: ProcessorFiles, config: Config) -> dict[Modality, Preprocessing]:
    """The processor shrinks an image until it has few enough tiles."""
    del config
    return {Modality.IMAGE: replace(bounded(files.image, (1, 1), HALF, LANCZOS), resizing=Resizing.OTHER)}


class Idefics3(Encoder):
    """A ViT whose learned positions are chosen by fractions of a tile's sides, then pixel shuffle and one layer.

    Every tile is full, so its positions are constants and nothing is masked.
    """

    def __init__(self, parts: Parts, config: Config) -> None:
        vision = config.vision_config
        size = side(vision.image_size)
        self.patch, self.merge = side(vision.patch_size), config.scale_factor
        patches = size // self.patch
        self.tile = merged_tile(size, self.patch, self.merge, "scale_factor")
        self.channels = vision.num_channels
        self.width = config.text_config.hidden_size
        self.attention_heads = heads_of(vision)
        self._tower: Any = parts["tower"]
        self._projector = parts["projector"]
        self.blocks = list(self._tower.encoder.layers)
        places = fractional_positions(patches, patches, self._tower.embeddings.num_patches_per_side)
        self._constants: Any = Constants(places=places[None].to(self._tower.device))
        self.constants = {"constants": self._constants}

    def encode(self, tiles: Tensor) -> Tensor:
        tower, embeddings = self._tower, self._tower.embeddings
        patches = embeddings.patch_embedding(tiles).flatten(2).transpose(1, 2)
        states = patches + embeddings.position_embedding(self._constants.places)
        rows = tower.post_layernorm(tower.encoder(inputs_embeds=states, attention_mask=None).last_hidden_state)
        return self._projector(rows)  # type: ignore[no-any-return]


class ModernVBert(Siglip):
    """SigLIP's tower, then pixel shuffle and one layer."""

    def _merge(self, config: Config, side: int) -> int:
        del side
        return int(config.pixel_shuffle_factor)


def _shuffles(factor: int, config: Config) -> bool:
    """Whether the patches of a tile are squares of so many patches a side."""
    return side(config.vision_config.image_size) // side(config.vision_config.patch_size) % factor == 0


_IDEFICS3 = TileFamily(
    model_type="idefics3",
    title="Idefics 3, SmolVLM",
    architecture="27 x 1152, patch 14, or 12 x 768, patch 16",
    tower=Module(source="idefics3.modeling_idefics3:Idefics3VisionTransformer", prefixes=in_model("vision_model.")),
    beside={
        "projector": Module(
            source="idefics3.modeling_idefics3:Idefics3Connector", prefixes=in_model("connector."), config=""
        )
    },
    encoder=Idefics3,
    processor=_images,
    videos=Accepts.NOTHING,
)

_SMOLVLM = replace(
    _IDEFICS3,
    model_type="smolvlm",
    title="SmolVLM2",
    tower=Module(source="smolvlm.modeling_smolvlm:SmolVLMVisionTransformer", prefixes=in_model("vision_model.")),
    beside={
        "projector": Module(
            source="smolvlm.modeling_smolvlm:SmolVLMConnector", prefixes=in_model("connector."), config=""
        )
    },
    processor=_images_and_clips,
    videos=Accepts.PICTURES,
)

_SHUFFLED = (Served("pixel_shuffle_factor", _shuffles, "a divisor of image_size / patch_size"),)
_MODERNVBERT = replace(
    _IDEFICS3,
    model_type="modernvbert",
    title="ModernVBERT",
    architecture="12 x 768, patch 16",
    tower=siglip("vision_model."),
    beside={
        "projector": Module(
            source="modernvbert.modeling_modernvbert:ModernVBertConnector",
            prefixes=in_model("connector."),
            config="",
            served=_SHUFFLED,
        )
    },
    encoder=ModernVBert,
    special="rows that the text encoder reads",
    transformers="5.23.0",
)

_COLMODERNVBERT = _MODERNVBERT.nested(
    "vlm.",
    model_type="colmodernvbert",
    title="ColModernVBERT",
    within="vlm_config",
    special="ModernVBERT's rows, which the retrieval model reads",
)

_ULTRAVBERT = replace(
    _MODERNVBERT,
    model_type="ultravbert",
    title="UltraVBERT",
    beside={
        "projector": Module(
            source="ultravbert.modeling_ultravbert:UltraVBertConnector",
            prefixes=in_model("connector."),
            config="",
            served=_SHUFFLED,
        )
    },
    processor=_capped_images,
    images=Accepts.PIXELS,
    transformers="5.23.0",
)

ROWS: tuple[Family, ...] = (_IDEFICS3, _SMOLVLM, _MODERNVBERT, _COLMODERNVBERT, _ULTRAVBERT)
