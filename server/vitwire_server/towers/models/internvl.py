"""InternVL (OpenGVLab), in transformers' layout and in its authors'; models of other makers that follow one of them.

NVLM-D and Eagle 2.5 are NVIDIA's, H2OVL H2O.ai's, Skywork-R1V Skywork's, Qianfan-OCR Baidu's, Intern-S1 InternLM's.
"""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from transformers.models.internvl.configuration_internvl import InternVLConfig
from transformers.models.internvl.modeling_internvl import InternVLMultiModalProjector

from vitwire_server.core.items import Modality
from vitwire_server.core.models import Preprocessing
from vitwire_server.core.tilings import Overview, Tiling, TilingRule
from vitwire_server.towers.configs import Config, Served, changed, dtype_of, new_config, one_of, require, usual_fields
from vitwire_server.towers.family import Accepts, in_model, stripped
from vitwire_server.towers.layouts.plain import PlainEncoder, PlainFamily
from vitwire_server.towers.layouts.tiles import TileFamily, side
from vitwire_server.towers.processors.settings import BICUBIC, CLIP, HALF, IMAGENET, ProcessorFiles, images, whole
from vitwire_server.towers.processors.tiles import fits_tower, nearest_ratio, stretched, tiled
from vitwire_server.towers.shared.fused import unfused
from vitwire_server.towers.shared.parts import part, projector, stock, variant
from vitwire_server.towers.shared.pooling import MEAN, class_token
from vitwire_server.towers.shared.projected_tiles import MLP1, SHUFFLED, Shuffled, shuffles
from vitwire_server.towers.shared.siglip import siglip, siglip_config

_DYNAMIC = {
    "dynamic_image_size": True,
    "use_thumbnail": True,
    "use_msac": False,
    "min_dynamic_patch": 1,
    "max_dynamic_patch": 12,
}
"""Fields that say how images are cut, and their defaults."""
_NAMES = (
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
_RATIO = Served("downsample_ratio", shuffles, SHUFFLED)
_PROJECTION = (_RATIO, one_of("vision_feature_select_strategy", "default"))


def _intern_vit(vision: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of OpenGVLab's configuration of the tower, by their names in transformers."""
    return {
        **usual_fields(vision, "hidden_act", "layer_norm_eps", "norm_type"),
        "attention_bias": vision.get("qkv_bias", True),
        "use_qk_norm": vision.get("qk_normalization", False),
    }


def _config(_: Path, settings: Mapping[str, Any]) -> Config:
    """From a config.json with `llm_config` and the tower's fields in OpenGVLab's way."""
    vision, language = settings["vision_config"], settings["llm_config"]
    size = vision["image_size"]
    require("ps_version", settings.get("ps_version", "v2"), "v2")
    require("force_image_size", settings.get("force_image_size", size), size, field="vision_config.image_size")
    config = new_config(
        "internvl",
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


def _eagle_config(_: Path, settings: Mapping[str, Any]) -> Config:
    """From a config.json with InternVL's fields around a SigLIP tower. Raises ValueError over another tower."""
    vision = settings["vision_config"]
    require("vision_config.model_type", vision.get("model_type"), "siglip_vision_model")
    config = siglip_config(
        {**vision, "image_size": settings.get("force_image_size") or vision["image_size"]},
        width=settings["text_config"]["hidden_size"],
        dtype=dtype_of(settings),
    )
    ratio, layer = settings.get("downsample_ratio", 0.5), settings.get("select_layer", -4)
    fields = {"downsample_ratio": ratio, "projector_hidden_act": "gelu", "vision_feature_layer": layer}
    return changed(config, fields)


def _settings(files: ProcessorFiles, config: Config) -> dict[Modality, Preprocessing]:
    tiling = nearest_ratio({**files.image, "crop_to_patches": True}, side(config.vision_config.image_size), cuts=True)
    frames = tiled(files.video, tiling, CLIP)
    return {Modality.IMAGE: tiled(files.image, tiling, CLIP), Modality.VIDEO: stretched(frames, tiling.tile)}


def _still_settings(image: Mapping[str, Any], config: Config) -> Preprocessing:
    """The original's processor is code that comes with the weights; its numbers are in config.json."""
    cut = config.dynamic_image_size
    tiling = Tiling(
        TilingRule.CLOSEST_RATIO if cut else TilingRule.STRETCH,
        (side(config.vision_config.image_size),) * 2,
        overview=Overview.LAST if cut and config.use_thumbnail else Overview.NONE,
        min_tiles=config.min_dynamic_patch if cut else 1,
        max_tiles=config.max_dynamic_patch if cut else 1,
    )
    return tiled({**image, "resample": BICUBIC}, tiling, IMAGENET)


def _original_settings(files: ProcessorFiles, config: Config) -> dict[Modality, Preprocessing]:
    settings, size = _still_settings(files.image, config), side(config.vision_config.image_size)
    return {Modality.IMAGE: settings, Modality.VIDEO: stretched(settings, (size, size))}


def _h2ovl_settings(image: Mapping[str, Any], config: Config) -> Preprocessing:
    """With `use_msac` an image is cut twice, with the whole image behind both cuts, whatever other fields say."""
    if not config.use_msac:
        return _still_settings(image, config)
    tile = (side(config.vision_config.image_size),) * 2
    tiling = Tiling(TilingRule.TWO_RATIOS, tile, overview=Overview.LAST, max_tiles=config.max_dynamic_patch)
    return tiled({**image, "resample": BICUBIC}, tiling, IMAGENET)


def _eagle_settings(image: Mapping[str, Any], config: Config) -> Preprocessing:
    if image.get("pad_during_tiling"):
        raise ValueError("unsupported pad_during_tiling")
    fits_tower(image, config.vision_config.image_size)
    tiling = Tiling(
        TilingRule.RATIO_AND_AREA,
        (config.vision_config.image_size,) * 2,
        overview=Overview.LAST if image.get("use_thumbnail", True) else Overview.NONE,
        min_tiles=whole(image, "min_dynamic_tiles", 1),
        max_tiles=whole(image, "max_dynamic_tiles", 12),
    )
    return tiled(image, tiling, HALF)


class NvlmProjector(InternVLMultiModalProjector):
    """InternVL's, with as many inner columns as the language model's MLP has, and without biases."""

    def __init__(self, config: InternVLConfig) -> None:
        super().__init__(config)
        text: Any = config.text_config
        columns = self.linear_1.in_features
        self.linear_1 = nn.Linear(columns, text.intermediate_size, bias=False)
        self.linear_2 = nn.Linear(text.intermediate_size, text.hidden_size, bias=False)


_unfused = unfused(".attn.qkv.", ".attention.{}_proj.")

_INTERNVL = TileFamily(
    "internvl",
    "InternVL",
    video_processor="InternVL",
    tower=stock("internvl.InternVLVisionModel", in_model("vision_tower.")),
    beside=projector("internvl.InternVLMultiModalProjector", served=_PROJECTION),
    encoder=partial(Shuffled, merged_by="downsample_ratio", layers="encoder.layer"),
    processor=_settings,
    videos=Accepts.PICTURES,
)

_CHAT = variant(
    _INTERNVL,
    "internvl_chat",
    "InternVL 2, 2.5, 3 and 3.5",
    configuration=_config,
    tower=stock("internvl.InternVLVisionModel", stripped("vision_model."), renames=_NAMES, convert=_unfused),
    beside=projector("internvl.InternVLMultiModalProjector", MLP1, served=_PROJECTION),
    processor=_original_settings,
)

_STILL = replace(_CHAT, processor=images(_still_settings), videos=Accepts.NOTHING)

ROWS = (
    _INTERNVL,
    _CHAT,
    variant(_STILL, "NVLM_D", "NVLM-D", beside=projector(NvlmProjector, MLP1, served=_PROJECTION)),
    variant(_STILL, "h2ovl_chat", "H2OVL Mississippi", processor=images(_h2ovl_settings)),
    variant(_STILL, "skywork_chat", "Skywork-R1V"),
    PlainFamily(
        "intern_vit_6b",
        "InternViT",
        configuration=lambda _, own: new_config("internvl_vision", **_intern_vit(own), dtype=dtype_of(own)),
        tower=part("internvl.InternVLVisionModel", stripped("vision_model.", ""), renames=_NAMES, convert=_unfused),
        encoder=PlainEncoder,
        layers="encoder.layer",
        poolers=(class_token(), MEAN),
        processor="CLIP",
    ),
    TileFamily(
        "eagle_2_5_vl",
        "Eagle 2.5",
        configuration=_eagle_config,
        tower=siglip("vision_model."),
        beside=projector("internvl.InternVLMultiModalProjector", MLP1, served=(_RATIO,)),
        encoder=partial(Shuffled, merged_by="downsample_ratio"),
        processor=images(_eagle_settings),
    ),
    variant(
        _INTERNVL, "interns1", "Intern-S1", configuration=lambda _, own: new_config("internvl", **deepcopy(dict(own)))
    ),
    variant(
        _INTERNVL,
        "qianfan_ocr",
        "Qianfan-OCR",
        tower=stock(
            "qianfan_ocr.QianfanOCRVisionModel",
            in_model("vision_tower.", "vision_model."),
            renames=((r"^encoder\.layers\.", "layers."), *_NAMES),
            convert=_unfused,
        ),
        beside=projector(
            "qianfan_ocr.QianfanOCRMultiModalProjector",
            in_model("multi_modal_projector.") | MLP1,
            served=_PROJECTION,
        ),
        encoder=partial(Shuffled, merged_by="downsample_ratio", layers="layers"),
        processor=lambda files, config: {Modality.IMAGE: _settings(files, config)[Modality.IMAGE]},
        videos=Accepts.NOTHING,
        transformers="5.23.0",
    ),
)
