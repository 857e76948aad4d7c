"""CLIP (OpenAI), its kin MetaCLIP 2 (Meta), Chinese CLIP (OFA), AltCLIP (BAAI) and MLCD (DeepGlint); AIMv2 (Apple)."""

from vitwire_server.towers.configs import Config
from vitwire_server.towers.family import stripped
from vitwire_server.towers.layouts.plain import PlainEncoder, PlainFamily
from vitwire_server.towers.shared.parts import part, stock, variant
from vitwire_server.towers.shared.pooling import MEAN, attention, class_token

_NORM = "post_layernorm"
"""Applied to the class token alone: rows of patches come before it, as transformers returns them."""
_PREFIXES = stripped("vision_model.")
_BUFFERS = ("embeddings.position_ids",)
"""Stored by older releases of transformers."""
_AIMV2, _AIMV2_HEAD = "aimv2.Aimv2VisionModel", "aimv2.Aimv2AttentionPoolingHead"
_NOT_AIMV2 = (*_BUFFERS, "head.")


def _projects(config: Config) -> bool:
    """True if a checkpoint of the vision part alone has the projection."""
    return "WithProjection" in str(config.architectures)  # whatever the file holds: config classes do not check it


_CLIP = PlainFamily(
    "clip",
    "CLIP",
    tower=stock("clip.CLIPVisionModel", _PREFIXES, ignored=_BUFFERS),
    encoder=PlainEncoder,
    poolers=(class_token(norm=_NORM, projected=True), MEAN),
    processor="CLIP",
)

_MLCD = variant(
    _CLIP,
    "mlcd_vision_model",
    "MLCD",
    tower=part("mlcd.MLCDVisionModel", stripped("vision_model.", ""), ignored=_BUFFERS),
    poolers=(class_token(norm=_NORM), MEAN),
)

_AIMV2_ALONE = variant(
    _CLIP,
    "aimv2_vision_model",
    "AIMv2 (vision alone)",
    tower=part(_AIMV2, stripped("vision_model.", ""), ignored=_NOT_AIMV2),
    leading=0,
    head="use_head",
    poolers=(attention(part(_AIMV2_HEAD, stripped("vision_model.head.", "head."))), MEAN),
)

ROWS = (
    _CLIP,
    variant(
        _CLIP,
        "clip_vision_model",
        "CLIP (vision alone)",
        tower=part("clip.CLIPVisionModel", stripped("vision_model.", ""), ignored=(*_BUFFERS, "visual_projection.")),
        poolers=(class_token(norm=_NORM, projected=True, offered=_projects), *_MLCD.poolers),
    ),
    variant(_CLIP, "metaclip_2", "MetaCLIP 2", "metaclip_2.MetaClip2VisionModel"),
    variant(_CLIP, "chinese_clip", "Chinese CLIP", "chinese_clip.ChineseCLIPVisionModel", processor="ChineseCLIP"),
    variant(
        _CLIP,
        "altclip",
        "AltCLIP",
        tower=stock(
            "altclip.AltCLIPVisionModel",
            _PREFIXES,
            renames=((r"^encoder\.layer\.", "encoder.layers."),),  # as transformers 5 writes it
            ignored=_BUFFERS,
        ),
    ),
    _MLCD,
    variant(_MLCD, "mlcd", "MLCD"),
    _AIMV2_ALONE,
    variant(
        _AIMV2_ALONE,
        "aimv2",
        "AIMv2",
        tower=stock(_AIMV2, stripped("vision_model."), ignored=_NOT_AIMV2),
        poolers=(attention(stock(_AIMV2_HEAD, stripped("vision_model.head.")), projected=True), MEAN),
    ),
)
