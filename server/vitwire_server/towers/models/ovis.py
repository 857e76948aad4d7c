"""Ovis 2 (AIDC-AI), in transformers' layout and in the authors' own; Ovis 2.5 and 2.6 in the authors'."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitwire_server.core.models import Preprocessing
from vitwire_server.core.tilings import Overview, Tiling, TilingRule
from vitwire_server.towers.configs import Config, changed, dtype_of, new_config, one_of, require, usual_fields
from vitwire_server.towers.family import Accepts, in_model, stripped
from vitwire_server.towers.layouts.heads import Projected
from vitwire_server.towers.layouts.tiles import TileFamily, side
from vitwire_server.towers.models.baidu import PADDLEOCR_VL, same_tower
from vitwire_server.towers.processors.settings import CLIP, images, per_channel, whole
from vitwire_server.towers.processors.tiles import fits_tower, shade, tiled
from vitwire_server.towers.shared.fused import position_tables, split_qkv
from vitwire_server.towers.shared.parts import projector, stock, variant
from vitwire_server.towers.shared.projected_tiles import ProjectedTiles, whole_squares

_INDICATORS = 5
"""Words of the visual vocabulary that mark an image's layout."""
_MARKS = 4
"""Such words of Ovis 2.5 and 2.6."""
_MOST_PARTS = 9
"""That the authors' code cuts an image in, unless it is asked for another number."""


def _ovis_settings(image: Mapping[str, Any], config: Config) -> Preprocessing:
    tile = (side(config.vision_config.image_size),) * 2
    fits_tower(image, tile[0])
    most = whole(image, "max_patches", 12)
    tiling = Tiling(TilingRule.STRETCH, tile)
    if image.get("crop_to_patches") and most > 1:
        covering = image.get("use_covering_area_grid", True)
        tiling = Tiling(
            TilingRule.COVERING if covering else TilingRule.CLOSEST_RATIO,
            tile,
            overview=Overview.FIRST,
            min_tiles=1 if covering else whole(image, "min_patches", 1),
            max_tiles=most,
        )
    return tiled(image, tiling, CLIP)


def _original_settings(image: Mapping[str, Any], config: Config) -> Preprocessing:
    """The authors' code cuts images, and has their processor resize and normalise the parts."""
    size = side(config.vision_config.image_size)
    tiling = Tiling(
        TilingRule.COVERING_PARTS,
        (size, size),
        overview=Overview.FIRST,
        max_tiles=_MOST_PARTS,
        background=shade(per_channel(image, "image_mean", CLIP[0])),
    )
    return tiled(image, tiling, CLIP)


def _ovis_config(_: Path, settings: Mapping[str, Any]) -> Config:
    """From a config.json that names the tower's fields in AIDC-AI's way."""
    own = settings["visual_tokenizer_config"]
    backbone = own["backbone_config"]
    require("visual_tokenizer_config.backbone_config.model_type", backbone["model_type"], "aimv2")
    return new_config(
        "ovis2",
        hidden_size=settings["hidden_size"],
        vision_config={
            **usual_fields(backbone, "num_channels", "qkv_bias", "rms_norm_eps"),
            **{name: own[name] for name in ("hidden_stride", "tokenize_function", "vocab_size") if name in own},
            "mlp_bias": backbone.get("use_bias", False),
            "num_visual_indicator_tokens": _INDICATORS,
        },
        dtype=dtype_of(settings),
    )


class Ovis2(ProjectedTiles):
    """The tower gives each token probabilities over a visual vocabulary, whose embeddings are averaged by them.

    The last words of the vocabulary mark an image's layout.
    """

    def encode(self, tiles: Tensor) -> Tensor:
        vision = self._tower.config
        words = self._projector.weight[: vision.vocab_size - vision.num_visual_indicator_tokens]
        return self._tower(pixel_values=tiles).pooler_output @ words  # type: ignore[no-any-return]


class VisualWords(nn.Module):
    """Means of visual words' embeddings by a token's probabilities; the last words mark where images begin and end."""

    def __init__(self, config: Config) -> None:
        """`config` is the whole checkpoint's."""
        super().__init__()
        vision, words = config.vision_config, config.visual_vocab_size
        self._columns, own = vision.hidden_size * vision.spatial_merge_size**2, words - _MARKS
        self.head = nn.Sequential(nn.Linear(self._columns, own, bias=False), nn.LayerNorm(own))
        self.vte = nn.Embedding(words, config.text_config.hidden_size)

    def forward(self, patches: Tensor) -> Tensor:
        """`(patches, C)`, token by token, to `(tokens, width)`."""
        chances: Tensor = self.head(patches.reshape(-1, self._columns)).softmax(-1, dtype=torch.float32)
        return chances.to(patches.dtype) @ self.vte.weight[:-_MARKS]


def _navit_config(_: Path, settings: Mapping[str, Any]) -> Config:
    """The tower is PaddleOCR-VL's but for the filter of learned positions, the order of patches and the last norm."""
    own = settings["vit_config"]
    fixed = {"fullatt_block_indexes": None, "num_patches": -1, "preserve_original_pe": True, "use_rope": True}
    for name, value in {"model_type": "siglip2_navit", "temporal_patch_size": 1, **fixed}.items():
        require(f"vit_config.{name}", own.get(name, value), value)
    config = same_tower({**own, "spatial_merge_size": own["hidden_stride"]}, settings)
    return changed(config, {"visual_vocab_size": settings["visual_vocab_size"]})


_OVIS2 = TileFamily(
    "ovis2",
    "Ovis 2",
    tower=stock(
        "ovis2.Ovis2VisionModel",
        in_model("vision_tower."),
        served=(
            one_of("tokenize_function", "softmax"),
            whole_squares("hidden_stride"),
        ),
    ),
    beside=projector(
        "ovis2.Ovis2VisualEmbeddingTable",
        in_model("visual_embeddings_table."),
        arguments=lambda config: (config.vision_config.vocab_size, config.hidden_size),
    ),
    encoder=partial(
        Ovis2,
        merged_by="vision_config.hidden_stride",
        layers="transformer.encoder.layers",
        width="hidden_size",
    ),
    processor=images(_ovis_settings),
)

_OVIS2_5 = variant(
    PADDLEOCR_VL,
    "ovis2_5",
    "Ovis 2.5",
    configuration=_navit_config,
    tower=stock(
        "vitwire_server.towers.models.subclasses:SiglipNavit",
        stripped("visual_tokenizer.vit."),
        ignored=("vision_model.post_layernorm.",),
    ),
    beside=projector(VisualWords, {"visual_tokenizer.head.": "head.", "vte.": "vte."}),
    head=Projected,
    inputs=replace(PADDLEOCR_VL.inputs, raster=False),
    images=Accepts.PIXELS,
    videos=Accepts.PIXELS,
)

ROWS = (
    _OVIS2,
    variant(
        _OVIS2,
        "ovis",
        _OVIS2.title,
        configuration=_ovis_config,
        tower=stock(
            "ovis2.Ovis2VisionModel",
            {"visual_tokenizer.backbone.": "transformer.", "visual_tokenizer.head.": "head."},
            renames=(
                (r"^head\.0\.", "head_linear."),
                (r"^head\.1\.", "head_norm."),
                (r"^transformer\.preprocessor\.pos_embed$", "transformer.embeddings.position_embedding.weight"),
                (r"^transformer\.preprocessor\.patchifier\.proj\.", "transformer.embeddings.patch_embedding."),
                (r"^transformer\.preprocessor\.patchifier\.norm\.", "transformer.embeddings.rms_norm."),
                (r"^transformer\.trunk\.post_trunk_norm\.", "transformer.rms_norm."),
                (r"^transformer\.trunk\.blocks\.", "transformer.encoder.layers."),
                (r"\.norm_([12])\.", r".rms_norm\1."),
                (r"\.attn\.proj\.", ".attention.out_proj."),
                (r"\.mlp\.fc1\.", ".ffn.gate_proj."),
                (r"\.mlp\.fc2\.", ".ffn.down_proj."),
                (r"\.mlp\.fc3\.", ".ffn.up_proj."),
            ),
            convert=lambda weights, _: position_tables(split_qkv(weights, ".attn.qkv.", ".attention.{}_proj.")),
            served=_OVIS2.tower.served,
        ),
        beside={"projector": replace(_OVIS2.modules["projector"], prefixes=stripped("vte."))},
        processor=images(_original_settings),
    ),
    _OVIS2_5,
    *(replace(_OVIS2_5, model_type=name, title="Ovis 2.6") for name in ("ovis2_6", "ovis2_6_moe", "ovis2_6_next")),
)
