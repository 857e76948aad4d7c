"""CLIP (OpenAI) and towers of its form: MetaCLIP 2 (Meta), Chinese CLIP (OFA), AltCLIP (BAAI), MLCD (DeepGlint)."""

from vitwire_server.towers.configs import Config
from vitwire_server.towers.family import stripped
from vitwire_server.towers.layouts.plain import PlainEncoder, PlainFamily
from vitwire_server.towers.shared.parts import part, stock, variant
from vitwire_server.towers.shared.pooling import MEAN, class_token

_NORM = "post_layernorm"
"""Applied to the class token alone: rows of patches come before it, as transformers returns them."""
_PREFIXES = stripped("vision_model.")
_BUFFERS = ("embeddings.position_ids",)
"""Stored by older releases of transformers."""


def _projects(config: Config) -> bool:
    """Whether a checkpoint of the vision part alone has the projection."""
    return "WithProjection" in str(config.architectures)  # whatever the file holds: config classes do not check it


_CLIP = PlainFamily(
    model_type="clip",
    title="CLIP",
    tower=stock("clip.CLIPVisionModel", _PREFIXES, ignored=_BUFFERS),
    encoder=PlainEncoder,
    poolers=(class_token(norm=_NORM, projected=True), MEAN),
    processor="CLIP",
)

_CLIP_VISION = variant(
    _CLIP,
    "clip_vision_model",
    "CLIP (vision alone)",
    tower=part("clip.CLIPVisionModel", stripped("vision_model.", ""), ignored=(*_BUFFERS, "visual_projection.")),
    poolers=(class_token(norm=_NORM, projected=True, offered=_projects), class_token(norm=_NORM), MEAN),
)

_MLCD = variant(
    _CLIP,
    "mlcd_vision_model",
    "MLCD",
    tower=part("mlcd.MLCDVisionModel", stripped("vision_model.", ""), ignored=_BUFFERS),
    poolers=(class_token(norm=_NORM), MEAN),
)

ROWS = (
    _CLIP,
    _CLIP_VISION,
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
)
