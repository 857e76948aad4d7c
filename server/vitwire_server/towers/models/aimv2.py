"""AIMv2 (Apple)."""

from vitwire_server.towers.family import stripped
from vitwire_server.towers.layouts.plain import PlainEncoder, PlainFamily, no_leading_tokens
from vitwire_server.towers.shared.parts import part, stock, variant
from vitwire_server.towers.shared.pooling import MEAN, attention

_TOWER = "aimv2.Aimv2VisionModel"
_HEAD = "aimv2.Aimv2AttentionPoolingHead"
_NOT_TOWER = ("head.", "embeddings.position_ids")

_AIMV2_VISION = PlainFamily(
    model_type="aimv2_vision_model",
    title="AIMv2 (vision alone)",
    tower=part(_TOWER, stripped("vision_model.", ""), ignored=_NOT_TOWER),
    encoder=PlainEncoder,
    leading=no_leading_tokens,
    head="use_head",
    poolers=(attention(part(_HEAD, stripped("vision_model.head.", "head."))), MEAN),
    processor="CLIP",
)

ROWS = (
    _AIMV2_VISION,
    variant(
        _AIMV2_VISION,
        "aimv2",
        "AIMv2",
        tower=stock(_TOWER, stripped("vision_model."), ignored=_NOT_TOWER),
        poolers=(attention(stock(_HEAD, stripped("vision_model.head.")), projected=True), MEAN),
    ),
)
