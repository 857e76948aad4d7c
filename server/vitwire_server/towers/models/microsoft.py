"""Florence-2, Phi-3 Vision, Phi-4 multimodal and Phi-4-reasoning-vision (Microsoft)."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import cached_property
from math import ceil, prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from vitwire_server.core.footprints import CanvasFootprints
from vitwire_server.core.geometries import CanvasGeometry
from vitwire_server.core.grids import Grid
from vitwire_server.core.models import Preprocessing
from vitwire_server.core.tilings import Tiling, TilingRule
from vitwire_server.towers.configs import Config, Served, changed, dtype_of, new_config, require
from vitwire_server.towers.family import Accepts, Parts, Weights, in_model, of_transformers
from vitwire_server.towers.layouts.assembled import AssembledEncoder, UnitInput
from vitwire_server.towers.layouts.raster import RasterFamily
from vitwire_server.towers.layouts.tiles import TileFamily, TileShape, TileTower, Unit
from vitwire_server.towers.models.siglip import Siglip2Tower, most_patches, siglip2
from vitwire_server.towers.processors.settings import CLIP, HALF, ProcessorFiles, images, unsized, whole
from vitwire_server.towers.processors.tiles import tiled
from vitwire_server.towers.shared.parts import projector, stock
from vitwire_server.towers.shared.projected_tiles import ProjectedTiles, clip, shuffled
from vitwire_server.towers.shared.siglip import masked_states

_FLORENCE_SIZE = 768
_MOST_PATCHES = 1024
"""A side of a window, to which tiles are padded."""
_SAME = (
    "depths",
    "num_groups",
    "num_heads",
    "patch_padding",
    "patch_prenorm",
    "patch_size",
    "patch_stride",
    "projection_dim",
    "window_size",
)
_FEATURES = ["spatial_avg_pool", "temporal_avg_pool"]


def _florence_settings(image: Mapping[str, Any], config: Config) -> Preprocessing:
    if image.get("do_center_crop"):
        raise ValueError("unsupported do_center_crop")
    tile = (config.vision_config.image_size,) * 2
    return tiled(image, Tiling(TilingRule.STRETCH, tile), CLIP)


class Florence2(TileTower):
    """Stages of convolutions and attention, in windows and over channels; the first row is the mean of the others."""

    def __init__(self, parts: Parts, config: Config) -> None:
        super().__init__(parts, config)
        vision = config.vision_config
        side = vision.image_size
        for kernel, stride, padding in zip(vision.patch_size, vision.patch_stride, vision.patch_padding, strict=True):
            side = (side + 2 * padding - kernel) // stride + 1
        if side > vision.max_position_embeddings:
            raise ValueError(
                f"{side} rows of patches are more than max_position_embeddings, {vision.max_position_embeddings}"
            )
        self.patch, self.merge, self.channels = prod(vision.patch_stride), 1, vision.in_channels
        self.tile = TileShape(vision.image_size, vision.image_size, 1 + side**2)
        self.width = vision.projection_dim
        self.attention_heads = vision.num_heads[-1], vision.embed_dim[-1] // vision.num_heads[-1]
        # Positions are kept in float32.
        embed = self._projector.visual_temporal_embed
        embed.register_forward_hook(lambda _, inputs, positions: positions.to(inputs[0].dtype))
        self.blocks = [layer for stage in self._tower.blocks for layer in stage]

    def encode(self, tiles: Tensor) -> Tensor:
        return self._projector(self._tower(tiles).last_hidden_state)  # type: ignore[no-any-return]


def _florence_config(folder: Path, settings: Mapping[str, Any]) -> Config:
    """From Microsoft's config.json or transformers', with the size of images from the processor's file."""
    own = settings.get("vision_config") or {}
    if own.get("model_type") == "davit":
        require("vision_config.image_feature_source", own.get("image_feature_source", _FEATURES), _FEATURES)
        vision = {
            **{name: own[name] for name in _SAME},
            "embed_dim": own["dim_embed"],
            "max_position_embeddings": own["image_pos_embed"]["max_pos_embeddings"],
            "max_temporal_embeddings": own["visual_temporal_embedding"]["max_temporal_embeddings"],
        }
        config = new_config("florence2", vision_config=vision, dtype=dtype_of(settings))
    else:
        config = of_transformers(folder, settings)
    return changed(config, {"vision_config.image_size": ProcessorFiles.read(folder).square(default=_FLORENCE_SIZE)})


def _turned(weights: Weights, _: Config) -> Weights:
    """Microsoft's projection is a matrix from the left."""
    return {
        name.replace(".turned", ".weight"): tensor.T.contiguous() if name.endswith(".turned") else tensor
        for name, tensor in weights.items()
    }


_CLIP_L_336 = {"hidden_size": 1024, "image_size": 336, "intermediate_size": 4096, "patch_size": 14}
_CLIP_L_336 |= {"num_attention_heads": 16, "num_hidden_layers": 24}
_MERGE = 2
"""Squares of patches of this side are averaged."""
HD_TRANSFORM = {
    "hd_transform_order": "sub_glb",
    "projection_cls": "mlp",
    "use_hd_transform": True,
    "with_learnable_separator": True,
}
TRANSFORM = {**HD_TRANSFORM, "image_token_compression_cls": "avg_pool_2d"}
"""Fields of the authors' config.json about the steps that follow the tower."""


class Separators(nn.Module):
    """The projector, with the embeddings of line ends and of what stands between crops and overview."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        columns = config.vision_config.hidden_size * getattr(config, "patches", 1)
        self.sub_img_feature_extensor = nn.Parameter(torch.zeros(1, 1, 1, columns))
        self.global_img_feature_extensor = nn.Parameter(torch.zeros(1, 1, columns))
        self.img_projection_up = nn.Linear(columns, config.hidden_size)
        self.img_projection_down = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, rows: Tensor) -> Tensor:
        """Rows `(tiles, rows, C)` and behind them a line end and a separator, projected."""
        marks = [self.sub_img_feature_extensor.view(1, 1, -1), self.global_img_feature_extensor]
        joined = torch.cat([rows, *(mark.expand(len(rows), 1, -1) for mark in marks)], dim=1)
        projected: Tensor = self.img_projection_down(functional.gelu(self.img_projection_up(joined)))
        return projected


class Phi4(AssembledEncoder, ProjectedTiles):
    """SigLIP on the overview and on crops of a canvas; patches of background are not attended to.

    transformers computes crops without background as if attention were causal where it attends through SDPA; this is
    what its eager attention and the authors' code compute.
    """

    def __init__(self, parts: Parts, config: Config) -> None:
        super().__init__(parts, config, width="hidden_size")
        vision = config.vision_config
        self.merge = _MERGE
        self._side = self.tile.width // self.patch
        self._lines = self._side // _MERGE
        self.tile = self.tile._replace(tokens=self._lines**2)
        layer = vision.feature_layer
        self.blocks = self.blocks[: vision.num_hidden_layers + 1 + layer if layer < 0 else layer]
        self.footprint = CanvasFootprints(self._side, _MERGE)
        self.unit = Unit(1, self.footprint.tokens, self._lines**2 + 2, self._side**2)
        self.inputs = {"attended": UnitInput((self._side, self._side), torch.bool, padding=1)}
        self.fewest = 2

    @cached_property
    def geometry(self) -> CanvasGeometry:
        return CanvasGeometry(**asdict(super().geometry))

    def sample(self, units: int) -> Grid:
        return Grid(1, self._side, self._side * (units - 1))

    def lay(self, grid: Grid) -> tuple[Mapping[str, Tensor], Tensor]:
        """Which patches of each tile are not background, and rows of the crops, line by line, then of the overview."""
        rows, columns = ceil(grid.h / self._side), ceil(grid.w / self._side)
        canvas = torch.zeros(rows * self._side, columns * self._side, dtype=torch.bool)
        canvas[: grid.h, : grid.w] = True
        crops = canvas.unflatten(0, (rows, -1)).unflatten(2, (columns, -1)).transpose(1, 2).flatten(0, 1)
        whole = torch.ones(1, self._side, self._side, dtype=torch.bool)
        down = torch.arange(ceil(grid.h / _MERGE))[:, None]
        right = torch.arange(ceil(grid.w / _MERGE))[None]
        crop = 1 + down // self._lines * columns + right // self._lines
        places = crop * self.unit.rows + down % self._lines * self._lines + right % self._lines
        overview = torch.arange(self._lines**2).view(self._lines, -1)
        separator = torch.tensor([self._lines**2 + 1])
        order = torch.cat([self._with_line_ends(places), separator, self._with_line_ends(overview)])
        return {"attended": torch.cat([whole, crops])}, order

    def _with_line_ends(self, lines: Tensor) -> Tensor:
        return functional.pad(lines, (0, 1), value=self._lines**2).flatten()

    def encode_units(self, tiles: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        attended = inputs["attended"]
        states = masked_states(self._tower, self.blocks, tiles, attended)
        squares = states.unflatten(1, (self._side, -1)).permute(0, 3, 1, 2)
        return self._projector(functional.avg_pool2d(squares, _MERGE).flatten(2).transpose(1, 2))  # type: ignore[no-any-return]


class Phi3(Phi4):
    """CLIP on the overview and on crops of a canvas that has no background; squares of patches are projected."""

    def __init__(self, parts: Parts, config: Config) -> None:
        super().__init__(parts, config)
        self.inputs = {}

    def encode_units(self, tiles: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        del inputs
        states = self._tower.pre_layrnorm(self._tower.embeddings(tiles))
        for block in self.blocks:
            states = block(states, None)
        return self._projector(shuffled(states[:, 1:], _MERGE))  # type: ignore[no-any-return]


_PHI4 = TileFamily(
    "phi4_multimodal",
    "Phi-4 multimodal",
    tower=stock(
        "phi4_multimodal.Phi4MultimodalVisionModel",
        in_model("embed_tokens_extend.image_embed.img_processor."),
        served=(
            Served(
                "image_size",
                lambda size, vision: size % (vision.patch_size * _MERGE) == 0 and size == vision.crop_size,
                "crop_size, and a multiple of twice the patch_size",
            ),
            Served(
                "feature_layer",
                lambda layer, vision: -vision.num_hidden_layers - 1 <= layer <= vision.num_hidden_layers,
                "from -num_hidden_layers - 1 to num_hidden_layers",
            ),
        ),
    ),
    beside=projector(
        Separators,
        in_model("embed_tokens_extend.image_embed.", "vision_embed_tokens."),
        renames=(
            (r"^img_projection\.0\.", "img_projection_up."),
            (r"^img_projection\.2\.", "img_projection_down."),
            (r"^glb_GN$", "global_img_feature_extensor"),
            (r"^sub_GN$", "sub_img_feature_extensor"),
        ),
        ignored=("img_processor.",),
    ),
    transformers="5.23.0",
    encoder=Phi4,
    processor=images(lambda image, _: unsized(image, HALF)),  # only torch has the filter of the overview
    images=Accepts.PIXELS,
)


def _original_config(_: Path, settings: Mapping[str, Any]) -> Config:
    """Microsoft's layout, whose config.json leaves out the tower's sizes: they are in its code."""
    embedding = (settings.get("embd_layer") or {}).get("image_embd_layer") or {}
    for name, value in TRANSFORM.items():
        require(f"embd_layer.image_embd_layer.{name}", embedding.get(name, value), value)
    return new_config(
        "phi4_multimodal",
        hidden_size=settings["hidden_size"],
        vision_config=settings.get("vision_config") or {},
        dtype=dtype_of(settings),
    )


def _phi3_config(_: Path, settings: Mapping[str, Any]) -> Config:
    """The authors' config.json, which leaves out the tower's sizes too: openai/clip-vit-large-patch14-336's."""
    own, embedding = settings["img_processor"], settings["embd_layer"]
    require("img_processor.name", own["name"], "clip_vision_model")
    require("img_processor.type_feature", own.get("type_feature", "patch"), "patch")
    for name, value in HD_TRANSFORM.items():
        require(f"embd_layer.{name}", embedding.get(name), value)
    vision = {**_CLIP_L_336, "feature_layer": own.get("layer_idx", -2), **(settings.get("vision_config") or {})}
    vision |= {"crop_size": vision["image_size"], "model_type": "clip_vision_model"}
    config = new_config("llava", vision_config=vision, vision_feature_layer=-1, dtype=dtype_of(settings))
    return changed(config, {"hidden_size": settings["hidden_size"], "patches": _MERGE**2})


class Phi4Siglip(Siglip2Tower):
    """SigLIP 2 without its last layer and without the norm behind it, and LLaVA's projector."""

    def __init__(self, family: RasterFamily, parts: Parts, config: Config) -> None:
        super().__init__(family, parts, config)
        self.blocks, self.model.post_layernorm = self.blocks[:-1], nn.Identity()

    def _rows(self, pixels: Tensor, tensors: Mapping[str, Tensor], attended: Mapping[str, Any]) -> Tensor:
        return self._projector(super()._rows(pixels, tensors, attended))  # type: ignore[no-any-return]


def _phi4_siglip_config(_: Path, settings: Mapping[str, Any]) -> Config:
    """The authors' config.json, which has the bounds of an image's patches too."""
    require("mm_projector_type", settings.get("mm_projector_type", "mlp2x_gelu"), "mlp2x_gelu")
    name = str(settings["mm_vision_tower"]).lower()
    if "naflex" not in name:
        raise ValueError(f"mm_vision_tower is {name!r}, but must be a NaFlex model")
    vision = {"patch_size": 14 if "patch14" in name else 16, **settings["vision_config"]}
    vision |= {"model_type": "siglip2_vision_model", "vision_use_head": False}
    text = {"model_type": "llama", "hidden_size": settings["hidden_size"], "num_attention_heads": 1}
    config = new_config("llava", vision_config=vision, text_config=text, dtype=dtype_of(settings))
    patches = (whole(settings, "min_num_patches", 256), whole(settings, "max_num_patches", 3600))
    return changed(config, {"areas": tuple(number * vision["patch_size"] ** 2 for number in patches)})


ROWS = (
    TileFamily(
        "florence2",
        "Florence-2",
        configuration=_florence_config,
        tower=stock(
            "florence2.Florence2VisionBackbone",
            in_model("vision_tower."),
            renames=(
                (r"^(convs\.\d+)\.proj\.", r"\1.conv."),
                (r"\.(conv[12])\.fn\.dw\.", r".\1."),
                (r"\.(window|channel)_attn\.norm\.", ".norm1."),
                (r"\.(window|channel)_attn\.fn\.", r".\1_attn."),
                (r"\.ffn\.norm\.", ".norm2."),
                (r"\.ffn\.fn\.net\.", ".ffn."),
            ),
            served=(Served("window_size", lambda size, _: 0 < size < _MOST_PATCHES, f"from 1 to {_MOST_PATCHES - 1}"),),
        ),
        beside=projector(
            "florence2.Florence2MultiModalProjector",
            {
                **in_model("multi_modal_projector."),
                **{name: name for name in ("image_projection", "image_proj_norm.", "visual_temporal_embed.")},
                "image_pos_embed.": "image_position_embed.",
            },
            renames=((r"^image_projection$", "image_projection.turned"),),
            convert=_turned,
        ),
        encoder=Florence2,
        processor=images(_florence_settings),
    ),
    replace(
        _PHI4,
        model_type="phi3_v",
        title="Phi-3 Vision, Phi-3.5 Vision",
        configuration=_phi3_config,
        tower=replace(clip("vision_embed_tokens.img_processor."), served=_PHI4.tower.served),
        encoder=Phi3,
        processor=images(lambda image, _: unsized(image, CLIP)),
        transformers="5.17.0",
    ),
    _PHI4,
    replace(_PHI4, model_type="phi4mm", configuration=_original_config),
    RasterFamily(
        "phi4-siglip",
        "Phi-4-reasoning-vision",
        configuration=_phi4_siglip_config,
        tower=siglip2(in_model("vision_tower.vision_tower.vision_model.")),
        beside=projector(
            "llava.LlavaMultiModalProjector",
            {"model.mm_projector.0.": "linear_1.", "model.mm_projector.2.": "linear_2."},
        ),
        forward=Phi4Siglip,
        channels_last=True,
        processor=images(lambda _, config: most_patches({}, config.areas)),
        in_code=True,
    ),
)
