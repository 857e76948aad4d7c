"""DeepSeek-VL, with SigLIP alone and with SAM beside it."""

from dataclasses import replace
from typing import Any

from torch import Tensor
from transformers.models.deepseek_vl_hybrid.modeling_deepseek_vl_hybrid import DeepseekVLSamVisionProj

from vitwire_server.core.items import Modality
from vitwire_server.core.models import Preprocessing
from vitwire_server.core.tilings import Tiling, TilingRule
from vitwire_server.towers.configs import Config
from vitwire_server.towers.family import Accepts, Family, Module, Parts, in_model
from vitwire_server.towers.layouts.crops import PairEncoder, PairFamily
from vitwire_server.towers.layouts.tiles import TileFamily, TileShape, heads_of
from vitwire_server.towers.processors.settings import CLIP, ProcessorFiles, normalised, per_channel, whole
from vitwire_server.towers.processors.tiles import shade, squared, tiled
from vitwire_server.towers.shared.modules import SingleParameter
from vitwire_server.towers.shared.sam import gather_relative_positions
from vitwire_server.towers.shared.siglip import Siglip, siglip


def _deepseek_settings(files: ProcessorFiles, config: Config) -> dict[Modality, Preprocessing]:
    return {Modality.IMAGE: squared(files.image, config.vision_config.image_size, CLIP)}


def _hybrid_settings(files: ProcessorFiles, config: Config) -> dict[Modality, Preprocessing]:
    """Tiles are made of crops, which are larger."""
    low, high = config.vision_config.image_size, config.high_res_vision_config.image_size
    image = files.image
    mean, std = normalised(image, CLIP, "high_res_image")
    tiling = Tiling(
        TilingRule.SQUARE,
        (low, low),
        background=shade(per_channel(image, "image_mean", CLIP[0])),
        min_side=whole(image, "min_size", 14),
        crop=(high, high),
        crop_background=shade(per_channel(image, "high_res_image_mean", CLIP[0])),
        crop_resample=whole(image, "high_res_resample") if "high_res_resample" in image else None,
    )
    return {Modality.IMAGE: replace(tiled(image, tiling, CLIP), crop_mean=mean, crop_std=std)}


class Alpha(SingleParameter):
    """Weight of the inner layer in DeepSeek-VL's high resolution."""

    def __init__(self, config: Config) -> None:
        del config
        super().__init__(1)


class Merger(DeepseekVLSamVisionProj):
    """SAM's rows brought to SigLIP's grid, whose side is in the configuration of the whole."""

    def __init__(self, config: Config) -> None:
        vision = config.vision_config
        super().__init__(config.high_res_vision_config, output_size=vision.image_size // vision.patch_size)


class DeepseekHybrid(PairEncoder):
    """SigLIP on the small tile, SAM on the large one, projected together."""

    def __init__(self, parts: Parts, config: Config) -> None:
        vision, sam = config.vision_config, config.high_res_vision_config
        self.patch, self.merge = vision.patch_size, 1
        self.tile = TileShape(vision.image_size, vision.image_size, (vision.image_size // vision.patch_size) ** 2)
        self.crop = (sam.image_size, sam.image_size)
        self.width = config.text_config.hidden_size
        self.attention_heads = heads_of(vision)
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
    videos=Accepts.NOTHING,
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
    videos=Accepts.NOTHING,
    special="pixels are the small tile, crops the large one; transformers' layout (deepseek-community)",
)

ROWS: tuple[Family, ...] = (_DEEPSEEK_VL, _HYBRID)
