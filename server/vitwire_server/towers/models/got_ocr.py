"""GOT-OCR 2 (StepFun), in transformers' layout."""

from typing import Any

from torch import Tensor

from vitwire_server.core.items import Modality
from vitwire_server.core.models import Preprocessing
from vitwire_server.towers.configs import Config
from vitwire_server.towers.family import Accepts, Family, Module, Parts, in_model, projector
from vitwire_server.towers.layouts.tiles import Encoder, TileFamily, heads_of, merged_tile, side
from vitwire_server.towers.processors.settings import CLIP, ProcessorFiles
from vitwire_server.towers.processors.tiles import nearest_ratio, tiled
from vitwire_server.towers.shared.sam import gather_relative_positions

_MERGE = 4
"""Two convolutions of stride 2 follow the tower."""


def _got_settings(files: ProcessorFiles, config: Config) -> dict[Modality, Preprocessing]:
    tiling = nearest_ratio(files.image, side(config.vision_config.image_size), cuts=False)
    return {Modality.IMAGE: tiled(files.image, tiling, CLIP)}


class GotOcr2(Encoder):
    """SAM's tower, and a projector that makes one row of 4 x 4 patches."""

    def __init__(self, parts: Parts, config: Config) -> None:
        vision = config.vision_config
        size = side(vision.image_size)
        self.patch, self.merge = side(vision.patch_size), _MERGE
        patches = size // self.patch
        self.tile = merged_tile(size, self.patch, self.merge, "the stride of the projector")
        self.channels = vision.num_channels
        self.width = config.text_config.hidden_size
        self.attention_heads = heads_of(vision)
        self._tower: Any = parts["tower"]
        self._projector = parts["projector"]
        self.blocks = list(self._tower.layers)
        if vision.use_rel_pos:
            gather_relative_positions(self._tower, (patches,))

    def encode(self, tiles: Tensor) -> Tensor:
        return self._projector(self._tower(tiles).last_hidden_state)  # type: ignore[no-any-return]


_GOT_OCR2 = TileFamily(
    model_type="got_ocr2",
    title="GOT-OCR 2",
    architecture="SAM 12 x 768, patch 16",
    tower=Module(source="got_ocr2.modeling_got_ocr2:GotOcr2VisionEncoder", prefixes=in_model("vision_tower.")),
    beside=projector("got_ocr2.modeling_got_ocr2:GotOcr2MultiModalProjector"),
    encoder=GotOcr2,
    processor=_got_settings,
    videos=Accepts.NOTHING,
    special="transformers' own layout (`-hf`); images are one tile unless the processor's file cuts them",
)

ROWS: tuple[Family, ...] = (_GOT_OCR2,)
