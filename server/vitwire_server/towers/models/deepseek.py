"""DeepSeek's vision towers: DeepSeek-VL with one view and with two, and DeepSeek-OCR-2."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.deepseek_vl_hybrid.modeling_deepseek_vl_hybrid import DeepseekVLSamVisionProj

from vitwire_server.core.items import Modality
from vitwire_server.core.models import Preprocessing
from vitwire_server.core.tilings import Tiling, TilingRule
from vitwire_server.towers.family import Family, Module, Parts, in_model, stripped
from vitwire_server.towers.layouts.parameters import Lone
from vitwire_server.towers.layouts.siglip import Siglip, siglip
from vitwire_server.towers.layouts.tiles import TileFamily, View, module_heads
from vitwire_server.towers.layouts.two_views import CropEncoder, CropFamily, PairEncoder, PairFamily
from vitwire_server.towers.models.step import Constants
from vitwire_server.towers.processors.settings import (
    CLIP,
    HALF,
    Processor,
    per_channel,
    square,
)
from vitwire_server.towers.processors.tiles import shade, tiled
from vitwire_server.towers.relative import gather_relative_positions


def _deepseek_settings(files: Processor, config: Any) -> dict[Modality, Preprocessing]:  # noqa: ANN401
    size = config.vision_config.image_size
    tiling = Tiling(
        TilingRule.SQUARE,
        (size, size),
        background=shade(per_channel(files.image, "image_mean", CLIP[0])),
        min_side=int(files.image.get("min_size", 14)),
    )
    return {Modality.IMAGE: tiled(files.image, tiling, CLIP)}


def _hybrid_settings(files: Processor, config: Any) -> dict[Modality, Preprocessing]:  # noqa: ANN401
    """The small view is made of the large one."""
    low, high = config.vision_config.image_size, config.high_res_vision_config.image_size
    image = files.image
    mean = per_channel(image, "high_res_image_mean", CLIP[0])
    std = per_channel(image, "high_res_image_std", CLIP[1])
    tiling = Tiling(
        TilingRule.SQUARE,
        (low, low),
        background=shade(per_channel(image, "image_mean", CLIP[0])),
        min_side=int(image.get("min_size", 14)),
        crop=(high, high),
        crop_background=shade(mean),
        crop_resample=int(image["high_res_resample"]) if "high_res_resample" in image else None,
    )
    return {Modality.IMAGE: replace(tiled(image, tiling, CLIP), crop_mean=mean, crop_std=std)}


def _ocr_settings(files: Processor, config: Any) -> dict[Modality, Preprocessing]:  # noqa: ANN401
    view, crop = config.vision_config.sam_config.image_size, config.crop_size
    image = files.image
    if not image.get("crop_to_patches", True):
        raise ValueError("crop_to_patches false is not served")
    tiling = Tiling(
        TilingRule.CLOSEST_RATIO,
        (view, view),
        min_tiles=int(image.get("min_patches", 2)),
        max_tiles=int(image.get("max_patches", 6)),
        background=tuple(int(value) for value in image.get("background_color", (127, 127, 127))),
        crop=(crop, crop),
    )
    return {Modality.IMAGE: tiled(image, tiling, HALF)}


@dataclass(frozen=True, kw_only=True)
class OcrFamily(CropFamily):
    """DeepSeek-OCR-2, whose sizes are in its processor's files."""

    def read_config(self, folder: Path, settings: Mapping[str, Any]) -> Any:  # noqa: ANN401
        """See Family."""
        config = super().read_config(folder, settings)
        config.crop_size = square(Processor.read(folder).image, "tile_size", 768)
        return config


class Alpha(Lone):
    """Weight of the inner layer in DeepSeek-VL's high resolution."""

    def __init__(self, config: Any) -> None:  # noqa: ANN401 - configurations are of many classes
        del config
        super().__init__(1)


class Separator(Lone):
    """The row behind every image of DeepSeek-OCR-2."""

    def __init__(self, config: Any) -> None:  # noqa: ANN401
        super().__init__(config.text_config.hidden_size)


class Merger(DeepseekVLSamVisionProj):
    """SAM's rows brought to SigLIP's grid, whose side is in the configuration of the whole."""

    def __init__(self, config: Any) -> None:  # noqa: ANN401
        vision = config.vision_config
        super().__init__(config.high_res_vision_config, output_size=vision.image_size // vision.patch_size)


class QueryProjection(nn.Linear):
    """DeepSeek-OCR-2's projector, which transformers keeps as a bare layer of the whole model."""

    def __init__(self, config: Any) -> None:  # noqa: ANN401
        super().__init__(config.vision_config.encoder_config.hidden_size, config.text_config.hidden_size)


class DeepseekHybrid(PairEncoder):
    """SigLIP on the small tile, SAM on the large one, projected together."""

    def __init__(self, parts: Parts, config: Any) -> None:  # noqa: ANN401
        vision, sam = config.vision_config, config.high_res_vision_config
        self.patch, self.merge = vision.patch_size, 1
        self.view = View(vision.image_size, vision.image_size, (vision.image_size // vision.patch_size) ** 2)
        self.crop = (sam.image_size, sam.image_size)
        self.width = config.text_config.hidden_size
        self.heads = module_heads(vision)
        self._tower: Any = parts["tower"]
        self._sam: Any = parts["sam"]
        self._neck, self._merger, self._alpha = (parts[name] for name in ("neck", "merger", "alpha"))
        self._projector = parts["projector"]
        self._inner = sam.global_attn_indexes[0]
        encoder = self._sam.vision_encoder
        if sam.use_rel_pos:
            gather_relative_positions(encoder, (sam.image_size // sam.patch_size,))
        self.blocks = [*self._tower.encoder.layers, *encoder.layers]

    def encode_pairs(self, tiles: Tensor, crops: Tensor) -> Tensor:
        low = self._tower(pixel_values=tiles).last_hidden_state
        return self._projector(low, self._high(crops))  # type: ignore[no-any-return]

    def _high(self, crops: Tensor) -> Tensor:
        """SAM's last layer and an inner one, `(tiles, tokens, C)`."""
        encoder = self._sam.vision_encoder
        states = encoder.patch_embed(crops)
        if encoder.pos_embed is not None:
            states = states + encoder.pos_embed
        inner = states
        for index, layer in enumerate(encoder.layers):
            states = layer(states)
            if index == self._inner:
                inner = states
        last = self._merger(encoder.neck(states))
        merged: Tensor = last + self._merger(self._neck(inner)) * self._alpha.weight
        return merged.flatten(2).transpose(1, 2)


class DeepseekOcr2(CropEncoder):
    """SAM, then a language model's layers in which learned queries read the patches: their rows count."""

    def __init__(self, parts: Parts, config: Any) -> None:  # noqa: ANN401
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
                raise ValueError(f"a view of {size} pixels does not become {count} tokens")
        self.view = View(sam.image_size, sam.image_size, counts[sam.image_size] + 1)
        self.crop = View(config.crop_size, config.crop_size, counts[config.crop_size])
        self.width = config.text_config.hidden_size
        self.heads = module_heads(vision.encoder_config)
        if sam.use_rel_pos:
            gather_relative_positions(self._tower.sam_encoder, tuple(size // self.patch for size in self._queries))
        self._constants = nn.ModuleDict({str(size): self._fixed(count) for size, count in counts.items()})
        self._tower.constants = self._constants  # so that they move with it
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

    def _rows(self, views: Tensor) -> Tensor:
        size = views.shape[-1]
        queries, constants = self._queries[size].weight, self._constants[str(size)]
        encoder: Any = self._tower.vision_encoder
        patches = self._tower.sam_encoder(views).last_hidden_state.flatten(2).transpose(1, 2)
        states = torch.cat([patches, queries.expand(len(views), -1, -1)], dim=1)
        turns = (constants.cosines.to(states.dtype), constants.sines.to(states.dtype))
        for layer in encoder.layers:
            states = layer(states, attention_mask=constants.seen, position_embeddings=turns)
        return self._projector(encoder.norm(states[:, patches.shape[1] :]))  # type: ignore[no-any-return]


_DEEPSEEK_VL = TileFamily(
    model_type="deepseek_vl",
    title="DeepSeek-VL",
    architecture="24 x 1024, patch 16",
    tower=siglip("vision_model."),
    beside={
        "projector": Module(
            source="deepseek_vl.modeling_deepseek_vl:DeepseekVLAligner",
            prefixes=in_model("aligner."),
            config="",
        )
    },
    encoder=Siglip,
    processor=_deepseek_settings,
    converts=False,
    videos=False,
    special="transformers' layout (deepseek-community)",
)


_HYBRID = PairFamily(
    model_type="deepseek_vl_hybrid",
    title="DeepSeek-VL with SAM",
    architecture="24 x 1024, patch 16, and SAM 12 x 768",
    tower=siglip("vision_model."),
    beside={
        "sam": Module(
            source="sam.modeling_sam:SamVisionModel",
            prefixes=in_model("high_res_vision_model."),
            config="high_res_vision_config",
        ),
        "neck": Module(
            source="deepseek_vl_hybrid.modeling_deepseek_vl_hybrid:DeepseekVLSamVisionNeck",
            prefixes=in_model("high_res_vision_neck."),
            config="high_res_vision_config",
        ),
        "merger": Module(
            source=f"{__name__}:Merger",
            prefixes=in_model("high_res_vision_proj."),
            config="",
        ),
        "alpha": Module(
            source=f"{__name__}:Alpha",
            prefixes={"model.high_res_vision_alpha": "weight", "high_res_vision_alpha": "weight"},
            config="",
        ),
        "projector": Module(
            source="deepseek_vl_hybrid.modeling_deepseek_vl_hybrid:DeepseekVLHybridAligner",
            prefixes=in_model("aligner."),
            config="",
        ),
    },
    encoder=DeepseekHybrid,
    processor=_hybrid_settings,
    converts=False,
    videos=False,
    special="pixels are the small view, crops the large one; transformers' layout (deepseek-community)",
)


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
        renames=(
            (r"^sam_encoder\.blocks\.", "sam_encoder.layers."),
            (r"^(sam_encoder\.layers\.\d+)\.norm([12])\.", r"\1.layer_norm\2."),
            (r"^sam_encoder\.patch_embed\.proj\.", "sam_encoder.patch_embed.projection."),
            (r"^sam_encoder\.neck\.0\.", "sam_encoder.neck.conv1."),
            (r"^sam_encoder\.neck\.1\.", "sam_encoder.neck.layer_norm1."),
            (r"^sam_encoder\.neck\.2\.", "sam_encoder.neck.conv2."),
            (r"^sam_encoder\.neck\.3\.", "sam_encoder.neck.layer_norm2."),
            (r"^sam_encoder\.net_2\.", "sam_encoder.proj.conv1."),
            (r"^sam_encoder\.net_3\.", "sam_encoder.proj.conv2."),
            (r"^query_(768|1024)\.", r"query_\1_resolution."),
        ),
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
    videos=False,
    special="one view of each image as pixels, tiles of large ones as crops; crops, view, separator",
)


ROWS: tuple[Family, ...] = (_DEEPSEEK_VL, _HYBRID, _DEEPSEEK_OCR2)
