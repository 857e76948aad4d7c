"""Ovis 2 (AIDC-AI), in transformers' layout and in the authors' own."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from vitwire_server.core.models import Preprocessing
from vitwire_server.core.tilings import Overview, Tiling, TilingRule
from vitwire_server.towers.configs import Config, dtype_of, new_config, one_of, require, usual_fields
from vitwire_server.towers.family import in_model, stripped
from vitwire_server.towers.layouts.tiles import TileFamily, side
from vitwire_server.towers.processors.settings import CLIP, images, per_channel, whole
from vitwire_server.towers.processors.tiles import fits_tower, shade, tiled
from vitwire_server.towers.shared.fused import position_tables, split_qkv
from vitwire_server.towers.shared.parts import projector, stock, variant
from vitwire_server.towers.shared.projected_tiles import ProjectedTiles, whole_squares

_INDICATORS = 5
"""Words of the visual vocabulary that mark an image's layout."""
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
)
