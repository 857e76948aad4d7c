"""DeepSeek-OCR-2: SAM, then a language model's layers."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitwire_server.core.items import Modality
from vitwire_server.core.models import Preprocessing
from vitwire_server.core.tilings import Tiling, TilingRule
from vitwire_server.towers.configs import Config, changed
from vitwire_server.towers.family import Accepts, Family, Module, Parts, stripped
from vitwire_server.towers.layouts.crops import CropEncoder, CropFamily
from vitwire_server.towers.layouts.tiles import TileShape, heads_of
from vitwire_server.towers.processors.settings import HALF, ProcessorFiles, whole
from vitwire_server.towers.processors.tiles import tiled
from vitwire_server.towers.shared.modules import Constants, SingleParameter
from vitwire_server.towers.shared.sam import gather_relative_positions

SAM_NAMES = (
    (r"^sam_encoder\.blocks\.", "sam_encoder.layers."),
    (r"^(sam_encoder\.layers\.\d+)\.norm([12])\.", r"\1.layer_norm\2."),
    (r"^sam_encoder\.patch_embed\.proj\.", "sam_encoder.patch_embed.projection."),
    (r"^sam_encoder\.neck\.0\.", "sam_encoder.neck.conv1."),
    (r"^sam_encoder\.neck\.1\.", "sam_encoder.neck.layer_norm1."),
    (r"^sam_encoder\.neck\.2\.", "sam_encoder.neck.conv2."),
    (r"^sam_encoder\.neck\.3\.", "sam_encoder.neck.layer_norm2."),
    (r"^sam_encoder\.net_2\.", "sam_encoder.proj.conv1."),
    (r"^sam_encoder\.net_3\.", "sam_encoder.proj.conv2."),
)
"""Names of the authors' SAM, and transformers'."""
_MOST_CROPS = 6
"""Where the processor's files do not say."""


def _ocr_settings(files: ProcessorFiles, config: Config) -> dict[Modality, Preprocessing]:
    return ocr_settings(files, config, _MOST_CROPS)


def ocr_settings(files: ProcessorFiles, config: Config, most: int) -> dict[Modality, Preprocessing]:
    """An overview of each image and crops of large ones: `most` of them where the files do not say."""
    overview, crop = config.vision_config.sam_config.image_size, config.crop_size
    image = files.image
    if not image.get("crop_to_patches", True):
        raise ValueError("crop_to_patches false is not served")
    tiling = Tiling(
        TilingRule.CLOSEST_RATIO,
        (overview, overview),
        min_tiles=whole(image, "min_patches", 2),
        max_tiles=whole(image, "max_patches", most),
        background=tuple(int(value) for value in image.get("background_color", (127, 127, 127))),
        crop=(crop, crop),
    )
    return {Modality.IMAGE: tiled(image, tiling, HALF)}


class Separator(SingleParameter):
    """The row behind every image of DeepSeek-OCR-2."""

    def __init__(self, config: Config) -> None:
        super().__init__(config.text_config.hidden_size)


class QueryProjection(nn.Linear):
    """DeepSeek-OCR-2's projector, which transformers keeps as a bare layer of the whole model."""

    def __init__(self, config: Config) -> None:
        super().__init__(config.vision_config.encoder_config.hidden_size, config.text_config.hidden_size)


class DeepseekOcr2(CropEncoder):
    """SAM, then a language model's layers in which learned queries read the patches: their rows count."""

    def __init__(self, parts: Parts, config: Config) -> None:
        vision = config.vision_config
        sam = vision.sam_config
        self.patch, self.merge = sam.patch_size, 4
        self._tower: Any = parts["tower"]
        self._projector = parts["projector"]
        self._separator = parts["separator"]
        self._queries = {
            sam.image_size: self._tower.query_1024_resolution,
            config.crop_size: self._tower.query_768_resolution,
        }
        counts = {size: len(queries.weight) for size, queries in self._queries.items()}
        for size, count in counts.items():
            if count != (size // self.patch // self.merge) ** 2:
                raise ValueError(f"a side of {size} pixels does not become {count} tokens")
        self.tile = TileShape(sam.image_size, sam.image_size, counts[sam.image_size] + 1)
        self.crop = TileShape(config.crop_size, config.crop_size, counts[config.crop_size])
        self.width = config.text_config.hidden_size
        self.attention_heads = heads_of(vision.encoder_config)
        if sam.use_rel_pos:
            gather_relative_positions(self._tower.sam_encoder, tuple(size // self.patch for size in self._queries))
        self._constants = nn.ModuleDict({str(size): self._fixed(count) for size, count in counts.items()})
        self.constants = {"constants": self._constants}
        self.blocks = [*self._tower.sam_encoder.layers, *self._tower.vision_encoder.layers]

    @torch.no_grad()
    def _fixed(self, count: int) -> Constants:
        """Mask and rotary positions of so many patches and as many queries: a query sees those before it."""
        weight, length = self._tower.query_1024_resolution.weight, 2 * count
        seen = torch.ones(length, length, dtype=torch.bool).tril()
        seen[:count, :count] = True
        positions = torch.arange(length, device=weight.device).unsqueeze(0)
        cosines, sines = self._tower.vision_encoder.rotary_emb(weight.float(), positions)
        return Constants(seen=seen[None, None].to(weight.device), cosines=cosines, sines=sines)

    def encode(self, tiles: Tensor) -> Tensor:
        rows = self._rows(tiles)
        return torch.cat([rows, self._separator.weight.expand(len(rows), 1, -1)], dim=1)

    def encode_crops(self, crops: Tensor) -> Tensor:
        return self._rows(crops)

    def _rows(self, pictures: Tensor) -> Tensor:
        size = pictures.shape[-1]
        queries, constants = self._queries[size].weight, self._constants[str(size)]
        encoder: Any = self._tower.vision_encoder
        patches = self._tower.sam_encoder(pictures).last_hidden_state.flatten(2).transpose(1, 2)
        states = torch.cat([patches, queries.expand(len(pictures), -1, -1)], dim=1)
        rotary = (constants.cosines.to(states.dtype), constants.sines.to(states.dtype))
        for layer in encoder.layers:
            states = layer(states, attention_mask=constants.seen, position_embeddings=rotary)
        return self._projector(encoder.norm(states[:, patches.shape[1] :]))  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True)
class OcrFamily(CropFamily):
    """DeepSeek-OCR-2, whose sizes are in its processor's files."""

    def read_config(self, folder: Path, settings: Mapping[str, Any]) -> Config:
        """See Family."""
        config = super().read_config(folder, settings)
        return changed(config, {"crop_size": ProcessorFiles.read(folder).square("tile_size", 768)})


_DEEPSEEK_OCR2 = OcrFamily(
    model_type="deepseek_ocr2",
    title="DeepSeek-OCR-2",
    architecture="SAM 12 x 768, then 24 x 896",
    tower=Module(
        source="deepseek_ocr2.modeling_deepseek_ocr2:DeepseekOcr2VisionModel",
        prefixes={
            "model.vision_tower.": "",
            "vision_tower.": "",
            "model.sam_model.": "sam_encoder.",
            "model.qwen2_model.model.model.": "vision_encoder.",
            "model.qwen2_model.query_": "query_",
        },
        renames=(*SAM_NAMES, (r"^query_(768|1024)\.", r"query_\1_resolution.")),
        ignored=("vision_encoder.embed_tokens.",),
    ),
    beside={
        "projector": Module(
            source=f"{__name__}:QueryProjection",
            prefixes=stripped("model.multi_modal_projector.", "model.projector.layers."),
            config="",
        ),
        "separator": Module(
            source=f"{__name__}:Separator",
            prefixes={"model.view_separator": "weight", "model.view_seperator": "weight"},
            config="",
        ),
    },
    encoder=DeepseekOcr2,
    processor=_ocr_settings,
    videos=Accepts.NOTHING,
    special="the overview of each image as pixels, tiles of large ones as crops; crops, overview, separator",
)


ROWS: tuple[Family, ...] = (_DEEPSEEK_OCR2,)
