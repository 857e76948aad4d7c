"""AIMv2 (Apple)."""

from dataclasses import replace

from vitwire_server.towers.family import Family, Module, stripped
from vitwire_server.towers.layouts.plain import PlainEncoder, PlainFamily, no_leading_tokens
from vitwire_server.towers.shared.pooling import MEAN, attention

_TOWER = "aimv2.modeling_aimv2:Aimv2VisionModel"
_HEAD = "aimv2.modeling_aimv2:Aimv2AttentionPoolingHead"
_NOT_TOWER = ("head.", "embeddings.position_ids")

_AIMV2_VISION = PlainFamily(
    model_type="aimv2_vision_model",
    title="AIMv2 (vision alone)",
    architecture="24 x 1024 to 24 x 3072, patch 14",
    tower=Module(source=_TOWER, prefixes=stripped("vision_model.", ""), ignored=_NOT_TOWER, config=""),
    encoder=PlainEncoder,
    leading=no_leading_tokens,
    head="use_head",
    poolers=(attention(Module(source=_HEAD, prefixes=stripped("vision_model.head.", "head."), config="")), MEAN),
    processor="CLIP",
    special="rows of the patches, after the last norm",
)

_AIMV2 = replace(
    _AIMV2_VISION,
    model_type="aimv2",
    title="AIMv2",
    tower=Module(source=_TOWER, prefixes=stripped("vision_model."), ignored=_NOT_TOWER),
    poolers=(attention(Module(source=_HEAD, prefixes=stripped("vision_model.head.")), projected=True), MEAN),
    special="rows of the patches, after the last norm; attention: with the projection",
)

ROWS: tuple[Family, ...] = (_AIMV2_VISION, _AIMV2)
