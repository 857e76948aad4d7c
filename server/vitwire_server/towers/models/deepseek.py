"""DeepSeek-VL, with SigLIP alone or with SAM, DeepSeek-VL2, and Janus's tower for images."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from vitwire_server.core.models import Preprocessing
from vitwire_server.core.tilings import Overview, Tiling, TilingRule
from vitwire_server.towers.configs import Config, changed, dtype_of, require
from vitwire_server.towers.family import Parts, in_model, stripped
from vitwire_server.towers.files import optional_json
from vitwire_server.towers.layouts.tiles import PairEncoder, TileFamily
from vitwire_server.towers.processors.settings import CLIP, HALF, images, normalised, per_channel, whole
from vitwire_server.towers.processors.tiles import shade, squared, tiled
from vitwire_server.towers.shared.learned import gather_relative_positions
from vitwire_server.towers.shared.parts import SingleParameter, part, projector, stock, variant
from vitwire_server.towers.shared.projected_tiles import ProjectedTiles
from vitwire_server.towers.shared.siglip import siglip, siglip_config, siglip_of_blocks

_TOWER = {"image_size": 384, "patch_size": 16, "width": 1024, "layers": 24, "heads": 16, "mlp_ratio": 4}
"""Fields that DeepSeek-VL2's config.json leaves out, by the authors' configuration classes; the projector's below."""
_PROJECTOR = {
    "projector_type": "downsample_mlp_gelu",
    "input_dim": 1152,
    "n_embed": 2048,
    "depth": 2,
    "mlp_ratio": 1,
    "downsample_ratio": 2,
    "token_pooling": False,
}


def _hybrid_settings(image: Mapping[str, Any], config: Config) -> Preprocessing:
    """Tiles are made of crops, which are larger."""
    low, high = config.vision_config.image_size, config.high_res_vision_config.image_size
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
    return replace(tiled(image, tiling, CLIP), crop_mean=mean, crop_std=std)


class DeepseekHybrid(PairEncoder, ProjectedTiles):
    """SigLIP on the small tile, SAM on the large one, projected together."""

    def __init__(self, parts: Parts, config: Config) -> None:
        super().__init__(parts, config)
        sam = config.high_res_vision_config
        self.crop = (sam.image_size, sam.image_size)
        self._sam: Any = parts["sam"]
        self._neck, self._merger, self._alpha = (parts[name] for name in ("neck", "merger", "alpha"))
        self._inner = sam.global_attn_indexes[0]
        encoder = self._sam.vision_encoder
        if sam.use_rel_pos:
            gather_relative_positions(encoder, (sam.image_size // sam.patch_size,))
        self.blocks = [*self.blocks, *encoder.layers]

    def encode_pairs(self, tiles: Tensor, crops: Tensor) -> Tensor:
        """Joins the last layer of SAM and an inner one."""
        low = self._tower(pixel_values=tiles).last_hidden_state
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
        high = last + self._merger(self._neck(inner)) * self._alpha.weight
        return self._projector(low, high.flatten(2).transpose(1, 2))  # type: ignore[no-any-return]


def _vl2_config(folder: Path, settings: Mapping[str, Any]) -> Config:
    """Raises ValueError over another tower than SigLIP's, which DeepSeek-OCR-2 has under this `model_type`."""
    vision, projector = {**_TOWER, **settings["vision_config"]}, {**_PROJECTOR, **settings["projector_config"]}
    name = str(vision.get("model_name", "siglip_large_patch16_384"))
    if not name.startswith("siglip") or vision.get("class_token"):
        raise ValueError(f"vision_config.model_name is {name!r}; supported: SigLIP's towers without a class token")
    require("projector_config.projector_type", projector["projector_type"], "downsample_mlp_gelu")
    require("projector_config.token_pooling", projector["token_pooling"], None, False)
    config = siglip_config(
        {
            "hidden_size": vision["width"],
            "image_size": vision["image_size"],
            "intermediate_size": int(vision["width"] * vision["mlp_ratio"]),
            "num_attention_heads": vision["heads"],
            "num_hidden_layers": vision["layers"],
            "patch_size": vision["patch_size"],
        },
        width=projector["n_embed"],
        dtype=dtype_of(settings),
    )
    processor = {"candidate_resolutions": settings.get("candidate_resolutions")}
    processor |= optional_json(folder / "processor_config.json")
    return changed(config, {"projector": projector, "processor": processor})


def _vl2_settings(_: Mapping[str, Any], config: Config) -> Preprocessing:
    """The processor's numbers lie in processor_config.json, which is read with the configuration."""
    own, size = config.processor, config.vision_config.image_size
    resolutions = own["candidate_resolutions"] or [(size, size)]
    for sides in resolutions:
        if any(side % size or side < size for side in sides):
            raise ValueError(f"candidate_resolutions {list(sides)} are not multiples of {size}")
    layouts = tuple((height // size, width // size) for width, height in resolutions)
    tiling = Tiling(
        TilingRule.PADDED_FIT,
        (size, size),
        overview=Overview.FIRST,
        max_tiles=max(rows * columns for rows, columns in layouts),
        layouts=layouts,
        background=shade(per_channel(own, "image_mean", HALF[0])),
    )
    return tiled(own, tiling, HALF)


class DownsampleProjector(nn.Module):
    """Squares of patches, zeros beyond the last row and column, through an MLP."""

    def __init__(self, config: Config) -> None:
        """`config` is the whole checkpoint's."""
        super().__init__()
        own = config.projector
        self.ratio: int = own["downsample_ratio"]
        inner = own["n_embed"] * own["mlp_ratio"]
        layers: list[nn.Module] = [nn.Linear(own["input_dim"] * self.ratio**2, inner)]
        for _ in range(1, own["depth"] - 1):
            layers += [nn.GELU(), nn.Linear(inner, inner)]
        self.layers = nn.Sequential(*layers, nn.GELU(), nn.Linear(inner, own["n_embed"]))

    def forward(self, patches: Tensor) -> Tensor:
        """`(tiles, side * side, C)` to `(tiles, tokens, width)`; a token's columns are by channel, then by patch."""
        ratio, side = self.ratio, round(patches.shape[1] ** 0.5)
        spare = -side % ratio
        grid = functional.pad(patches.unflatten(1, (side, side)), (0, 0, 0, spare, 0, spare))
        squares = grid.unflatten(2, (-1, ratio)).unflatten(1, (-1, ratio)).permute(0, 1, 3, 5, 2, 4)
        rows: Tensor = self.layers(squares.flatten(3).flatten(1, 2))
        return rows


class DeepseekVL2(ProjectedTiles):
    """A row for each square of patches, those at the edges included."""

    def __init__(self, parts: Parts, config: Config) -> None:
        super().__init__(parts, config)
        self.merge = config.projector["downsample_ratio"]
        self.tile = self.tile._replace(tokens=(-(-self.tile.width // (self.patch * self.merge))) ** 2)


_DEEPSEEK_VL = TileFamily(
    "deepseek_vl",
    "DeepSeek-VL",
    tower=siglip("vision_model."),
    beside=projector("deepseek_vl.DeepseekVLAligner", in_model("aligner.")),
    encoder=ProjectedTiles,
    processor=images(lambda image, config: squared(image, config.vision_config.image_size, CLIP)),
    converts=False,
)

ROWS = (
    _DEEPSEEK_VL,
    TileFamily(
        "deepseek_vl_hybrid",
        "DeepSeek-VL with SAM",
        tower=siglip("vision_model."),
        beside={
            "sam": stock("sam.SamVisionModel", in_model("high_res_vision_model."), config="high_res_vision_config"),
            "neck": stock(
                "deepseek_vl_hybrid.DeepseekVLSamVisionNeck",
                in_model("high_res_vision_neck."),
                config="high_res_vision_config",
            ),
            "merger": part(
                "deepseek_vl_hybrid.DeepseekVLSamVisionProj",
                in_model("high_res_vision_proj."),
                arguments=lambda config: (
                    config.high_res_vision_config,
                    config.vision_config.image_size // config.vision_config.patch_size,
                ),
            ),
            "alpha": part(
                SingleParameter,
                {"model.high_res_vision_alpha": "weight", "high_res_vision_alpha": "weight"},
                arguments=lambda _: (1,),
            ),
            "projector": part("deepseek_vl_hybrid.DeepseekVLHybridAligner", in_model("aligner.")),
        },
        encoder=DeepseekHybrid,
        processor=images(_hybrid_settings),
        converts=False,
    ),
    TileFamily(
        "deepseek_vl_v2",
        "DeepSeek-VL2",
        configuration=_vl2_config,
        tower=siglip_of_blocks(stripped("vision.")),
        beside=projector(DownsampleProjector, stripped("projector.")),
        encoder=DeepseekVL2,
        processor=images(_vl2_settings),
        in_code=True,
    ),
    variant(
        _DEEPSEEK_VL,
        "janus",
        "Janus",
        tower=stock("janus.JanusVisionModel", in_model("vision_model.")),
        beside={"projector": stock("janus.JanusVisionAlignerMLP", in_model("aligner."))},
    ),
)
