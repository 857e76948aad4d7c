"""Llama 4 (Meta)."""

from typing import Any

from torch import Tensor

from vitwire_server.core.items import Modality
from vitwire_server.core.models import Preprocessing
from vitwire_server.core.tilings import Overview, Tiling, TilingRule
from vitwire_server.towers.configs import Config
from vitwire_server.towers.family import Accepts, Family, Module, Parts, in_model
from vitwire_server.towers.layouts.tiles import Encoder, TileFamily, TileShape, heads_of
from vitwire_server.towers.processors.settings import BILINEAR, HALF, ProcessorFiles
from vitwire_server.towers.processors.tiles import tiled
from vitwire_server.towers.served import Served
from vitwire_server.towers.shared.pixel_shuffle import SHUFFLED, shuffles


def _llama4_settings(files: ProcessorFiles, config: Config) -> dict[Modality, Preprocessing]:
    size = config.vision_config.image_size
    if files.image.get("resize_to_max_canvas"):
        raise ValueError("resize_to_max_canvas is not served")
    tiling = Tiling(
        TilingRule.CANVAS, (size, size), overview=Overview.LAST, max_tiles=int(files.image.get("max_patches", 16))
    )
    return {Modality.IMAGE: tiled(files.image, tiling, HALF, BILINEAR)}


class Llama4(Encoder):
    """A ViT whose adapter shuffles pixels; its class token comes last and is dropped."""

    def __init__(self, parts: Parts, config: Config) -> None:
        vision = config.vision_config
        self.patch = vision.patch_size
        self.merge = round(1 / vision.pixel_shuffle_ratio)
        patches = vision.image_size // self.patch
        if patches % self.merge:
            raise ValueError(f"{patches} patches a side cannot be merged by {self.merge}")
        self.tile = TileShape(vision.image_size, vision.image_size, (patches // self.merge) ** 2)
        self.channels = vision.num_channels
        self.width = config.text_config.hidden_size
        self.attention_heads = heads_of(vision)
        self._tower: Any = parts["tower"]
        self._projector = parts["projector"]
        self.blocks = list(self._tower.model.layers)

    def encode(self, tiles: Tensor) -> Tensor:
        rows: Tensor = self._tower(pixel_values=tiles).last_hidden_state
        return self._projector(rows)  # type: ignore[no-any-return]


_LLAMA4 = TileFamily(
    model_type="llama4",
    title="Llama 4",
    architecture="34 x 1408, patch 14",
    tower=Module(
        source="llama4.modeling_llama4:Llama4VisionModel",
        prefixes=in_model("vision_model."),
        served=(Served("pixel_shuffle_ratio", shuffles, SHUFFLED),),
    ),
    beside={
        "projector": Module(
            source="llama4.modeling_llama4:Llama4MultiModalProjector",
            prefixes=in_model("multi_modal_projector."),
            config="",
        )
    },
    encoder=Llama4,
    processor=_llama4_settings,
    videos=Accepts.NOTHING,
)

ROWS: tuple[Family, ...] = (_LLAMA4,)
