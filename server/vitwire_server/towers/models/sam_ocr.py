"""DeepSeek-OCR-2, whose SAM feeds a language model's layers; DeepSeek-OCR and Unlimited-OCR (Baidu): CLIP's."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitwire_server.core.models import Preprocessing
from vitwire_server.core.tilings import Tiling, TilingRule
from vitwire_server.towers.configs import Config, changed, dtype_of, new_config, require
from vitwire_server.towers.family import Module, Parts, in_model, of_transformers, stripped
from vitwire_server.towers.layouts.assembled import CropEncoder
from vitwire_server.towers.layouts.tiles import TileFamily, TileShape, heads_of
from vitwire_server.towers.processors.settings import HALF, ProcessorFiles, images, whole
from vitwire_server.towers.processors.tiles import tiled
from vitwire_server.towers.shared.fused import unfused
from vitwire_server.towers.shared.learned import gather_relative_positions
from vitwire_server.towers.shared.parts import Constants, SingleParameter, part, stock, variant

_SAM_NAMES = (
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
_MERGE = 4
"""Root of the patches of SAM that become one token."""


def _ocr_config(folder: Path, settings: Mapping[str, Any], *, crop: int) -> Config:
    """Adds `crop_size`, from the processor's files; `crop` is the default."""
    crop = ProcessorFiles.read(folder).square("tile_size", crop)
    return changed(of_transformers(folder, settings), {"crop_size": crop})


def _deepseek_ocr_config(folder: Path, settings: Mapping[str, Any]) -> Config:
    """DeepSeek-OCR's and Baidu's layout; the authors' code fixes what is not read here."""
    vision, projector = settings["vision_config"], settings["projector_config"]
    require("projector_config.projector_type", projector.get("projector_type"), "linear")
    sam, clip = (
        {**own, "hidden_size": own["width"], "num_attention_heads": own["heads"], "num_hidden_layers": own["layers"]}
        for own in (vision["width"]["sam_vit_b"], vision["width"]["clip-l-14-224"])
    )
    sam |= {"image_size": vision["image_size"], "mlp_dim": 4 * sam["width"]}
    config = new_config(
        "unlimited_ocr",
        vision_config={"sam_config": sam, "encoder_config": {**clip, "intermediate_size": 4 * clip["width"]}},
        text_config={"hidden_size": projector["n_embed"], "num_attention_heads": 1},
        dtype=dtype_of(settings),
    )
    return changed(config, {"crop_size": ProcessorFiles.read(folder).square("tile_size", 640)})


def _ocr_settings(image: Mapping[str, Any], config: Config, *, most: int) -> Preprocessing:
    """An overview of each image and crops of large ones, by default at most `most`."""
    overview, crop = config.vision_config.sam_config.image_size, config.crop_size
    if not image.get("crop_to_patches", True):
        raise ValueError("unsupported crop_to_patches: false")
    tiling = Tiling(
        TilingRule.CLOSEST_RATIO,
        (overview, overview),
        min_tiles=whole(image, "min_patches", 2),
        max_tiles=whole(image, "max_patches", most),
        background=tuple(int(value) for value in image.get("background_color", (127, 127, 127))),
        crop=(crop, crop),
    )
    return tiled(image, tiling, HALF)


class SamEncoder(CropEncoder):
    """Views through SAM and further layers, of the same tokens whether overview or crop; a separator ends an image."""

    def __init__(self, parts: Parts, config: Config) -> None:
        super().__init__(parts, config)
        vision = config.vision_config
        sam = vision.sam_config
        self.patch, self.merge = sam.patch_size, _MERGE
        self._separator = parts["separator"]
        counts = {size: self._tokens(size) for size in (sam.image_size, config.crop_size)}
        self.tile = TileShape(sam.image_size, sam.image_size, counts[sam.image_size] + 1)
        self.crop = TileShape(config.crop_size, config.crop_size, counts[config.crop_size])
        self.width = config.text_config.hidden_size
        self.attention_heads = heads_of(vision.encoder_config)
        if sam.use_rel_pos:
            gather_relative_positions(self._tower.sam_encoder, tuple(size // self.patch for size in counts))

    def _tokens(self, size: int) -> int:
        """Tokens of a view of this size. Raises ValueError over sizes that do not become whole tokens."""
        if size % (self.patch * self.merge):
            token = self.patch * self.merge
            raise ValueError(f"sam_config.image_size and tile_size must be multiples of {token}, but one is {size}")
        return (size // self.patch // self.merge) ** 2

    def encode(self, tiles: Tensor) -> Tensor:
        rows = self.encode_crops(tiles)
        return torch.cat([rows, self._separator.weight.expand(len(rows), 1, -1)], dim=1)


class UnlimitedOcr(SamEncoder):
    """CLIP's layers on SAM's features, and both side by side."""

    def __init__(self, parts: Parts, config: Config) -> None:
        super().__init__(parts, config)
        self.blocks = [*self._tower.sam_encoder.layers, *self._tower.vision_encoder.encoder.layers]

    def encode_crops(self, crops: Tensor) -> Tensor:
        return self._projector(self._tower(crops).last_hidden_state)  # type: ignore[no-any-return]


class DeepseekOcr2(SamEncoder):
    """A language model's layers, in which learned queries read SAM's patches: their rows count."""

    def __init__(self, parts: Parts, config: Config) -> None:
        tower: Any = parts["tower"]
        sizes = (config.vision_config.sam_config.image_size, config.crop_size)
        self._queries = dict(zip(sizes, (tower.query_1024_resolution, tower.query_768_resolution), strict=True))
        super().__init__(parts, config)
        counts = {size: len(queries.weight) for size, queries in self._queries.items()}
        self.model["constants"] = nn.ModuleDict({str(size): self._fixed(count) for size, count in counts.items()})
        self.blocks = [*self._tower.sam_encoder.layers, *self._tower.vision_encoder.layers]

    def _tokens(self, size: int) -> int:
        count = len(self._queries[size].weight)
        if count != (size // self.patch // self.merge) ** 2:
            raise ValueError(f"a side of {size} pixels does not become {count} tokens")
        return count

    @torch.no_grad()
    def _fixed(self, count: int) -> Constants:
        """Mask and rotary positions of this many patches and as many queries: a query sees those before it."""
        weight, length = self._tower.query_1024_resolution.weight, 2 * count
        seen = torch.ones(length, length, dtype=torch.bool).tril()
        seen[:count, :count] = True
        positions = torch.arange(length, device=weight.device).unsqueeze(0)
        cosines, sines = self._tower.vision_encoder.rotary_emb(weight.float(), positions)
        return Constants(seen=seen[None, None].to(weight.device), cosines=cosines, sines=sines)

    def encode_crops(self, crops: Tensor) -> Tensor:
        size = crops.shape[-1]
        queries, constants = self._queries[size].weight, self.model["constants"][str(size)]
        encoder = self._tower.vision_encoder
        patches = self._tower.sam_encoder(crops).last_hidden_state.flatten(2).transpose(1, 2)
        states = torch.cat([patches, queries.expand(len(crops), -1, -1)], dim=1)
        rotary = (constants.cosines.to(states.dtype), constants.sines.to(states.dtype))
        for layer in encoder.layers:
            states = layer(states, attention_mask=constants.seen, position_embeddings=rotary)
        return self._projector(encoder.norm(states[:, patches.shape[1] :]))  # type: ignore[no-any-return]


def _beside(columns: Callable[[Config], int]) -> dict[str, Module]:
    """The projector, from the tower's columns by its configuration, and the row behind every image."""
    return {
        "projector": part(
            nn.Linear,
            stripped("model.multi_modal_projector.", "model.projector.layers."),
            arguments=lambda config: (columns(config.vision_config), config.text_config.hidden_size),
        ),
        "separator": part(
            SingleParameter,
            {"model.view_separator": "weight", "model.view_seperator": "weight"},
            arguments=lambda config: (config.text_config.hidden_size,),
        ),
    }


_UNLIMITED_OCR = TileFamily(
    "unlimited_ocr",
    "Unlimited-OCR",
    configuration=partial(_ocr_config, crop=640),
    tower=stock(
        "unlimited_ocr.UnlimitedOcrVisionModel",
        {
            **in_model("vision_tower."),
            "model.sam_model.": "sam_encoder.",
            "sam_model.": "sam_encoder.",
            "model.vision_model.": "vision_encoder.",
            "vision_model.": "vision_encoder.",
        },
        renames=(*_SAM_NAMES, (r"^vision_encoder\.transformer\.", "vision_encoder.encoder.")),
        ignored=("vision_encoder.embeddings.patch_embedding.", "vision_encoder.embeddings.position_ids"),
        convert=unfused(".qkv_proj.", ".{}_proj."),
    ),
    beside=_beside(lambda vision: vision.sam_config.downsample_channels[-1] + vision.encoder_config.hidden_size),
    encoder=UnlimitedOcr,
    processor=images(partial(_ocr_settings, most=32)),
    in_code=True,
    transformers="5.23.0",
)

ROWS = (
    TileFamily(
        "deepseek_ocr2",
        "DeepSeek-OCR-2",
        configuration=partial(_ocr_config, crop=768),
        tower=stock(
            "deepseek_ocr2.DeepseekOcr2VisionModel",
            {
                **in_model("vision_tower."),
                "model.sam_model.": "sam_encoder.",
                "model.qwen2_model.model.model.": "vision_encoder.",
                "model.qwen2_model.query_": "query_",
            },
            renames=(*_SAM_NAMES, (r"^query_(768|1024)\.", r"query_\1_resolution.")),
            ignored=("vision_encoder.embed_tokens.",),
        ),
        beside=_beside(lambda vision: vision.encoder_config.hidden_size),
        encoder=DeepseekOcr2,
        processor=images(partial(_ocr_settings, most=6)),
        in_code=True,
    ),
    _UNLIMITED_OCR,
    variant(_UNLIMITED_OCR, "unlimited-ocr", "Unlimited-OCR", configuration=_deepseek_ocr_config),
    variant(
        _UNLIMITED_OCR,
        "deepseek_vl_v2",
        "DeepSeek-OCR",
        tower_type="deeplip_b_l",
        configuration=_deepseek_ocr_config,
        processor=images(partial(_ocr_settings, most=6)),
    ),
)
