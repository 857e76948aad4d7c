"""Unlimited-OCR (Baidu): SAM, then CLIP's layers on its features, and both side by side."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitwire_server.core.items import Modality
from vitwire_server.core.models import Preprocessing
from vitwire_server.towers.configs import Config, changed
from vitwire_server.towers.family import Accepts, Family, Module, Parts, Weights, stripped
from vitwire_server.towers.layouts.crops import CropEncoder, CropFamily
from vitwire_server.towers.layouts.tiles import TileShape, heads_of
from vitwire_server.towers.models.deepseek_ocr import SAM_NAMES, ocr_settings
from vitwire_server.towers.processors.settings import ProcessorFiles
from vitwire_server.towers.shared.fused import split_qkv
from vitwire_server.towers.shared.sam import gather_relative_positions

_MOST_CROPS, _CROP = 32, 640
_MERGE = 4
"""Root of the patches of SAM that become one token."""


class Projection(nn.Linear):
    """The projector, which transformers keeps as a bare layer of the whole model."""

    def __init__(self, config: Config) -> None:
        vision = config.vision_config
        columns = vision.sam_config.downsample_channels[-1] + vision.encoder_config.hidden_size
        super().__init__(columns, config.text_config.hidden_size)


class UnlimitedOcr(CropEncoder):
    """Each view through SAM and CLIP; behind the overview's rows is a separator."""

    def __init__(self, parts: Parts, config: Config) -> None:
        vision = config.vision_config
        sam = vision.sam_config
        self.patch, self.merge = sam.patch_size, _MERGE
        sizes = {size: size // self.patch // _MERGE for size in (sam.image_size, config.crop_size)}
        token = self.patch * _MERGE
        if any(size % token for size in sizes):
            raise ValueError(f"sam_config.image_size and tile_size are {list(sizes)}, but must be multiples of {token}")
        self.tile = TileShape(sam.image_size, sam.image_size, sizes[sam.image_size] ** 2 + 1)
        self.crop = TileShape(config.crop_size, config.crop_size, sizes[config.crop_size] ** 2)
        self.width = config.text_config.hidden_size
        self.attention_heads = heads_of(vision.encoder_config)
        self._tower: Any = parts["tower"]
        self._projector, self._separator = parts["projector"], parts["separator"]
        if sam.use_rel_pos:
            gather_relative_positions(self._tower.sam_encoder, tuple(size // self.patch for size in sizes))
        self.blocks = [*self._tower.sam_encoder.layers, *self._tower.vision_encoder.encoder.layers]

    def encode(self, tiles: Tensor) -> Tensor:
        rows = self.encode_crops(tiles)
        return torch.cat([rows, self._separator.weight.expand(len(rows), 1, -1)], dim=1)

    def encode_crops(self, crops: Tensor) -> Tensor:
        return self._projector(self._tower(crops).last_hidden_state)  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True)
class UnlimitedOcrFamily(CropFamily):
    """Unlimited-OCR, whose crops have a size in its processor's files."""

    def read_config(self, folder: Path, settings: Mapping[str, Any]) -> Config:
        """See Family."""
        config = super().read_config(folder, settings)
        return changed(config, {"crop_size": ProcessorFiles.read(folder).square("tile_size", _CROP)})


def _settings(files: ProcessorFiles, config: Config) -> dict[Modality, Preprocessing]:
    return ocr_settings(files, config, _MOST_CROPS)


def _unfused(weights: Weights, config: Config) -> Weights:
    """Query, key and value apart, as transformers holds them."""
    del config
    return split_qkv(weights, ".qkv_proj.", ".{}_proj.")


_UNLIMITED_OCR = UnlimitedOcrFamily(
    model_type="unlimited_ocr",
    title="Unlimited-OCR",
    architecture="SAM 12 x 768, then 24 x 1024",
    tower=Module(
        source="unlimited_ocr.modeling_unlimited_ocr:UnlimitedOcrVisionModel",
        prefixes={
            "model.vision_tower.": "",
            "vision_tower.": "",
            "model.sam_model.": "sam_encoder.",
            "sam_model.": "sam_encoder.",
            "model.vision_model.": "vision_encoder.",
            "vision_model.": "vision_encoder.",
        },
        renames=(*SAM_NAMES, (r"^vision_encoder\.transformer\.", "vision_encoder.encoder.")),
        ignored=("vision_encoder.embeddings.patch_embedding.", "vision_encoder.embeddings.position_ids"),
        convert=_unfused,
    ),
    beside={
        "projector": Module(
            source=f"{__name__}:Projection",
            prefixes=stripped("model.multi_modal_projector.", "model.projector.layers."),
            config="",
        ),
        "separator": Module(
            source="vitwire_server.towers.models.deepseek_ocr:Separator",
            prefixes={"model.view_separator": "weight", "model.view_seperator": "weight"},
            config="",
        ),
    },
    encoder=UnlimitedOcr,
    processor=_settings,
    videos=Accepts.NOTHING,
    special="the overview of each image as pixels, tiles of large ones as crops; line breaks stay with the LLM",
    transformers="5.23.0",
)


ROWS: tuple[Family, ...] = (_UNLIMITED_OCR,)
