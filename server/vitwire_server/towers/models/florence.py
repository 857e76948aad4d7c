"""Florence-2 (Microsoft)."""

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers.models.florence2.configuration_florence2 import Florence2Config

from vitwire_server.core.models import Preprocessing
from vitwire_server.core.tilings import Tiling, TilingRule
from vitwire_server.towers.configs import Config, changed, dtype_of
from vitwire_server.towers.family import Parts, Weights, in_model, of_transformers
from vitwire_server.towers.layouts.tiles import Encoder, TileFamily, TileShape
from vitwire_server.towers.processors.settings import IMAGENET, ProcessorFiles, images
from vitwire_server.towers.processors.tiles import tiled
from vitwire_server.towers.served import Served
from vitwire_server.towers.shared.parts import projector, stock

_SIZE = 768
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


def _settings(image: Mapping[str, Any], config: Config) -> Preprocessing:
    if image.get("do_center_crop"):
        raise ValueError("do_center_crop is not served")
    tile = (config.vision_config.image_size,) * 2
    return tiled(image, Tiling(TilingRule.STRETCH, tile), IMAGENET)


class Florence2(Encoder):
    """Stages of convolutions and attention, in windows and over channels; the first row is the mean of the others."""

    def __init__(self, parts: Parts, config: Config) -> None:
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
        self._tower: Any = parts["tower"]
        self._projector: Any = parts["projector"]
        self._projector.visual_temporal_embed.register_forward_hook(_in_dtype_of_input)
        self.blocks = [layer for stage in self._tower.blocks for layer in stage]

    def encode(self, tiles: Tensor) -> Tensor:
        return self._projector(self._tower(tiles).last_hidden_state)  # type: ignore[no-any-return]


def _in_dtype_of_input(_: object, inputs: tuple[Tensor], positions: Tensor) -> Tensor:
    """Positions are kept in float32."""
    return positions.to(inputs[0].dtype)


def _config(folder: Path, settings: Mapping[str, Any]) -> Config:
    """Of both layouts, and the size of images, which is in the processor's file alone.

    Raises KeyError or ValueError if config.json is not of a model that is supported.
    """
    own = settings.get("vision_config") or {}
    if own.get("model_type") == "davit":
        config: Config = Florence2Config(vision_config=_renamed(own), dtype=dtype_of(settings))
    else:
        config = of_transformers(folder, settings)
    return changed(config, {"vision_config.image_size": ProcessorFiles.read(folder).square(default=_SIZE)})


def _renamed(vision: Mapping[str, Any]) -> dict[str, Any]:
    """A tower's fields in Microsoft's config.json, by their names in transformers. Raises KeyError or ValueError."""
    features = vision.get("image_feature_source", _FEATURES)
    if features != _FEATURES:
        raise ValueError(f"vision_config.image_feature_source is {features}, but must be {_FEATURES}")
    return {
        **{name: vision[name] for name in _SAME},
        "embed_dim": vision["dim_embed"],
        "max_position_embeddings": vision["image_pos_embed"]["max_pos_embeddings"],
        "max_temporal_embeddings": vision["visual_temporal_embedding"]["max_temporal_embeddings"],
    }


def _turned(weights: Weights, _: Config) -> Weights:
    """Microsoft's projection is a matrix from the left."""
    return {
        name.replace(".turned", ".weight"): tensor.T.contiguous() if name.endswith(".turned") else tensor
        for name, tensor in weights.items()
    }


_FLORENCE2 = TileFamily(
    model_type="florence2",
    title="Florence-2",
    configuration=_config,
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
    processor=images(_settings),
)

ROWS = (_FLORENCE2,)
