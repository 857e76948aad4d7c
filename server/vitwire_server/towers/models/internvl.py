"""InternVL (OpenGVLab), in transformers' layout and in the authors' own; NVLM-D (NVIDIA); H2OVL (H2O.ai)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers.models.internvl.configuration_internvl import InternVLConfig, InternVLVisionConfig
from transformers.models.internvl.modeling_internvl import InternVLMultiModalProjector

from vitwire_server.core.items import Modality
from vitwire_server.core.models import Preprocessing
from vitwire_server.core.tilings import Overview, Tiling, TilingRule
from vitwire_server.towers.configs import Config, changed, dtype_of, last_layer
from vitwire_server.towers.family import Accepts, Family, Module, Parts, Weights, in_model, projector, stripped
from vitwire_server.towers.layouts.plain import PlainEncoder, PlainFamily
from vitwire_server.towers.layouts.tiles import Encoder, TileFamily, heads_of, merged_tile, side
from vitwire_server.towers.processors.settings import BICUBIC, IMAGENET, ProcessorFiles
from vitwire_server.towers.processors.tiles import nearest_ratio, stretched, tiled
from vitwire_server.towers.served import Served
from vitwire_server.towers.shared.fused import split_qkv
from vitwire_server.towers.shared.pixel_shuffle import MLP1, SHUFFLED, shuffled, shuffles
from vitwire_server.towers.shared.pooling import MEAN, class_token

_SAME = (
    "hidden_size",
    "hidden_act",
    "image_size",
    "intermediate_size",
    "layer_norm_eps",
    "norm_type",
    "num_attention_heads",
    "num_hidden_layers",
    "patch_size",
)

PROJECTION = (
    Served("downsample_ratio", shuffles, SHUFFLED),
    Served("vision_feature_select_strategy", lambda strategy, _: strategy == "default", "'default'"),
)

_DYNAMIC = {
    "dynamic_image_size": True,
    "use_thumbnail": True,
    "use_msac": False,
    "min_dynamic_patch": 1,
    "max_dynamic_patch": 12,
}
"""Fields that say how images are cut, and their defaults."""
ORIGINAL_NAMES = (
    (r"^encoder\.layers\.", "encoder.layer."),
    (r"\.ls([12])$", r".lambda_\1"),
    (r"\.attn\.proj\.", ".attention.projection_layer."),
    (r"\.attn\.([qk]_norm)\.", r".attention.\1."),
    (r"\.norm1\.", ".layernorm_before."),
    (r"\.norm2\.", ".layernorm_after."),
    (r"^embeddings\.class_embedding$", "embeddings.cls_token"),
    (r"^embeddings\.position_embedding$", "embeddings.position_embeddings"),
    (r"^embeddings\.patch_embedding\.", "embeddings.patch_embeddings.projection."),
)
"""Names of OpenGVLab's tower, and transformers'."""


def _intern_vit(vision: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of transformers' configuration of the tower, from those of OpenGVLab's."""
    return {
        **{name: vision[name] for name in _SAME if name in vision},
        "attention_bias": vision.get("qkv_bias", True),
        "use_qk_norm": vision.get("qk_normalization", False),
    }


def internvl_settings(files: ProcessorFiles, config: Config) -> dict[Modality, Preprocessing]:
    tiling = nearest_ratio({**files.image, "crop_to_patches": True}, side(config.vision_config.image_size), cuts=True)
    frames = tiled(files.video, tiling, IMAGENET)
    return {Modality.IMAGE: tiled(files.image, tiling, IMAGENET), Modality.VIDEO: stretched(frames, tiling.tile)}


def _original_settings(files: ProcessorFiles, config: Config) -> dict[Modality, Preprocessing]:
    """The original's processor is code beside the weights; its numbers are in config.json."""
    tile = (side(config.vision_config.image_size),) * 2
    cut = config.dynamic_image_size
    tiling = Tiling(
        TilingRule.CLOSEST_RATIO if cut else TilingRule.STRETCH,
        tile,
        overview=Overview.LAST if cut and config.use_thumbnail else Overview.NONE,
        min_tiles=config.min_dynamic_patch if cut else 1,
        max_tiles=config.max_dynamic_patch if cut else 1,
    )
    settings = tiled({**files.image, "resample": BICUBIC}, tiling, IMAGENET)
    return {Modality.IMAGE: settings, Modality.VIDEO: stretched(settings, tile)}


def _still_settings(files: ProcessorFiles, config: Config) -> dict[Modality, Preprocessing]:
    """Those of images alone."""
    return {Modality.IMAGE: _original_settings(files, config)[Modality.IMAGE]}


def _h2ovl_settings(files: ProcessorFiles, config: Config) -> dict[Modality, Preprocessing]:
    """With `use_msac` an image is cut twice, with the whole image behind both cuts, whatever other fields say."""
    (settings,) = _still_settings(files, config).values()
    if config.use_msac:
        tile = (side(config.vision_config.image_size),) * 2
        tiling = Tiling(TilingRule.TWO_RATIOS, tile, overview=Overview.LAST, max_tiles=config.max_dynamic_patch)
        settings = tiled({**files.image, "resample": BICUBIC}, tiling, IMAGENET)
    return {Modality.IMAGE: settings}


def unfused(weights: Weights, config: Config) -> Weights:
    """Query, key and value apart, as transformers holds them."""
    del config
    return split_qkv(weights, ".attn.qkv.", ".attention.{}_proj.")


class InternVL(Encoder):
    """A ViT with a class token, pixel shuffle, then the projector."""

    layers: ClassVar[str] = "encoder.layer"
    """Path of the tower's layers."""

    def __init__(self, parts: Parts, config: Config) -> None:
        last_layer(config)
        vision = config.vision_config
        size = side(vision.image_size)
        self.patch = side(vision.patch_size)
        self.merge = round(1 / config.downsample_ratio)
        self.tile = merged_tile(size, self.patch, self.merge, "downsample_ratio")
        self.channels = vision.num_channels
        self.width = config.text_config.hidden_size
        self.attention_heads = heads_of(vision)
        self._tower: Any = parts["tower"]
        self._projector = parts["projector"]
        self.blocks = list(self._tower.get_submodule(self.layers))

    def encode(self, tiles: Tensor) -> Tensor:
        patches: Tensor = self._tower(pixel_values=tiles).last_hidden_state[:, 1:]
        return self._projector(shuffled(patches, self.merge))  # type: ignore[no-any-return]


class NvlmProjector(InternVLMultiModalProjector):
    """InternVL's, with inner columns as many as those of the language model's MLP, and without biases."""

    def __init__(self, config: Any) -> None:  # noqa: ANN401 - transformers types its fields in part only
        super().__init__(config)
        text, columns = config.text_config, self.linear_1.in_features
        self.linear_1 = nn.Linear(columns, text.intermediate_size, bias=False)
        self.linear_2 = nn.Linear(text.intermediate_size, text.hidden_size, bias=False)


@dataclass(frozen=True, kw_only=True)
class OriginalInternVL(TileFamily):
    """Checkpoints whose config.json names the language model `llm_config` and the tower's fields in OpenGVLab's way."""

    def read_config(self, folder: Path, settings: Mapping[str, Any]) -> Config:
        """See Family. Raises ValueError over a generation that computes rows in another way."""
        del folder
        vision, language = dict(settings["vision_config"]), settings["llm_config"]
        if settings.get("ps_version", "v2") != "v2":
            raise ValueError(f"ps_version {settings['ps_version']!r} is not served, only 'v2' is")
        if settings.get("force_image_size", vision["image_size"]) != vision["image_size"]:
            raise ValueError(
                f"force_image_size {settings['force_image_size']} differs from image_size {vision['image_size']}"
            )
        config = InternVLConfig(
            vision_config=_intern_vit(vision),
            text_config={
                "model_type": "qwen2",
                "hidden_size": language["hidden_size"],
                "intermediate_size": language.get("intermediate_size", 0),
            },
            downsample_ratio=settings.get("downsample_ratio", 0.5),
            vision_feature_layer=settings.get("select_layer", -1),
            dtype=dtype_of(settings),
        )
        return changed(config, {name: settings.get(name, default) for name, default in _DYNAMIC.items()})


_INTERNVL = TileFamily(
    model_type="internvl",
    title="InternVL",
    architecture="24 x 1024 or 45 x 3200, patch 14",
    tower=Module(source="internvl.modeling_internvl:InternVLVisionModel", prefixes=in_model("vision_tower.")),
    beside=projector(
        "internvl.modeling_internvl:InternVLMultiModalProjector",
        served=PROJECTION,
    ),
    encoder=InternVL,
    processor=internvl_settings,
    special="transformers' own layout (`-hf`)",
)

_ORIGINAL_PROJECTOR = Module(
    source="internvl.modeling_internvl:InternVLMultiModalProjector",
    prefixes=MLP1,
    config="",
    served=PROJECTION,
)

_INTERNVL_CHAT = OriginalInternVL(
    model_type="internvl_chat",
    title="InternVL 2, 2.5, 3 and 3.5",
    architecture="24 x 1024 or 45 x 3200, patch 14",
    tower=Module(
        source="internvl.modeling_internvl:InternVLVisionModel",
        prefixes=stripped("vision_model."),
        renames=ORIGINAL_NAMES,
        convert=unfused,
    ),
    beside={"projector": _ORIGINAL_PROJECTOR},
    encoder=InternVL,
    processor=_original_settings,
    special="OpenGVLab's layout",
)

_NVLM = replace(
    _INTERNVL_CHAT,
    model_type="NVLM_D",
    title="NVLM-D",
    architecture="45 x 3200, patch 14",
    beside={"projector": replace(_INTERNVL_CHAT.modules["projector"], source=f"{__name__}:NvlmProjector")},
    processor=_still_settings,
    videos=Accepts.NOTHING,
    special="NVIDIA's layout; tags of tiles stay with the LLM",
)

_H2OVL = replace(
    _INTERNVL_CHAT,
    model_type="h2ovl_chat",
    title="H2OVL Mississippi",
    architecture="24 x 1024, patch 14",
    processor=_h2ovl_settings,
    videos=Accepts.NOTHING,
    special="H2O.ai's layout; with `use_msac`, tiles of two layouts as for a prompt with one image",
)


@dataclass(frozen=True, kw_only=True)
class OriginalInternViT(PlainFamily):
    """Checkpoints of the tower alone."""

    def stock_config(self, folder: Path, settings: Mapping[str, Any]) -> Config:
        """See PlainFamily."""
        del folder
        config: Config = InternVLVisionConfig(**_intern_vit(settings), dtype=dtype_of(settings))
        return config


_INTERN_VIT = OriginalInternViT(
    model_type="intern_vit_6b",
    title="InternViT",
    architecture="24 x 1024 or 45 x 3200, patch 14",
    tower=Module(
        source="internvl.modeling_internvl:InternVLVisionModel",
        prefixes=stripped("vision_model.", ""),
        renames=ORIGINAL_NAMES,
        convert=unfused,
        config="",
    ),
    encoder=PlainEncoder,
    layers="encoder.layer",
    poolers=(class_token(), MEAN),
    processor="CLIP",
    special="rows of the patches, without a final norm",
)

_SKYWORK = replace(
    _INTERNVL_CHAT,
    model_type="skywork_chat",
    title="Skywork-R1V",
    architecture="45 x 3200, patch 14",
    processor=_still_settings,
    videos=Accepts.NOTHING,
    special="Skywork's layout, which is OpenGVLab's",
)

ROWS: tuple[Family, ...] = (_INTERNVL, _INTERNVL_CHAT, _NVLM, _H2OVL, _SKYWORK, _INTERN_VIT)
