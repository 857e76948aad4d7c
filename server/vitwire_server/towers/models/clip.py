"""CLIP (OpenAI) and towers of its form: MetaCLIP 2 (Meta), Chinese CLIP (OFA), AltCLIP (BAAI), MLCD (DeepGlint)."""

from dataclasses import replace

from vitwire_server.towers.configs import Config
from vitwire_server.towers.family import Family, Module, stripped
from vitwire_server.towers.layouts.plain import PlainEncoder, PlainFamily
from vitwire_server.towers.shared.pooling import MEAN, class_token

_NORM = "post_layernorm"
"""Applied to the class token alone: rows of patches come before it, as transformers returns them."""
_PREFIXES = stripped("vision_model.")
_BUFFERS = ("embeddings.position_ids",)
"""Stored by older releases of transformers."""
_PATCHES = "rows of the patches before the last norm, which is the class token's; cls: with the projection"


def _projects(config: Config) -> bool:
    """Whether a checkpoint of the vision part alone has the projection."""
    return "WithProjection" in str(config.architectures)  # whatever the file holds: config classes do not check it


_CLIP = PlainFamily(
    model_type="clip",
    title="CLIP",
    architecture="12 x 768, 24 x 1024 or 48 x 1664, patch 14, 16 or 32",
    tower=Module(source="clip.modeling_clip:CLIPVisionModel", prefixes=_PREFIXES, ignored=_BUFFERS),
    encoder=PlainEncoder,
    poolers=(class_token(norm=_NORM, projected=True), MEAN),
    processor="CLIP",
    special=_PATCHES,
)

_CLIP_VISION = replace(
    _CLIP,
    model_type="clip_vision_model",
    title="CLIP (vision alone)",
    tower=Module(
        source="clip.modeling_clip:CLIPVisionModel",
        prefixes=stripped("vision_model.", ""),
        ignored=(*_BUFFERS, "visual_projection."),
        config="",
    ),
    poolers=(class_token(norm=_NORM, projected=True, offered=_projects), class_token(norm=_NORM), MEAN),
    special="with the projection or without; rows of the patches before the last norm",
)

_METACLIP2 = replace(
    _CLIP,
    model_type="metaclip_2",
    title="MetaCLIP 2",
    architecture="12 x 768 to 32 x 1280, patch 14 or 16",
    tower=Module(source="metaclip_2.modeling_metaclip_2:MetaClip2VisionModel", prefixes=_PREFIXES, ignored=_BUFFERS),
)

_CHINESE_CLIP = replace(
    _CLIP,
    model_type="chinese_clip",
    title="Chinese CLIP",
    architecture="12 x 768, 24 x 1024 or 32 x 1280, patch 14 or 16",
    tower=replace(_CLIP.tower, source="chinese_clip.modeling_chinese_clip:ChineseCLIPVisionModel"),
    processor="ChineseCLIP",
)

_ALTCLIP = replace(
    _CLIP,
    model_type="altclip",
    title="AltCLIP",
    architecture="24 x 1024, patch 14",
    tower=replace(
        _CLIP.tower,
        source="altclip.modeling_altclip:AltCLIPVisionModel",
        renames=((r"^encoder\.layer\.", "encoder.layers."),),  # as transformers 5 writes it
    ),
)

_MLCD = replace(
    _CLIP,
    model_type="mlcd_vision_model",
    title="MLCD",
    architecture="24 x 1024 or 48 x 1664, patch 14",
    tower=Module(
        source="mlcd.modeling_mlcd:MLCDVisionModel",
        prefixes=stripped("vision_model.", ""),
        ignored=_BUFFERS,
        config="",
    ),
    poolers=(class_token(norm=_NORM), MEAN),
    special="rotary positions; rows of the patches before the last norm, which is the class token's",
)

ROWS: tuple[Family, ...] = (
    _CLIP,
    _CLIP_VISION,
    _METACLIP2,
    _CHINESE_CLIP,
    _ALTCLIP,
    _MLCD,
    replace(_MLCD, model_type="mlcd"),
)
