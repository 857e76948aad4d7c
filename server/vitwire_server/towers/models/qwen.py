"""Qwen's vision towers, the Omni models' included (Alibaba), and models of other makers that have them."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5VisionConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel

from vitwire_server.towers.configs import Config, Served, changed, dtype_of, new_config, require
from vitwire_server.towers.family import Accepts, ReadConfig, in_model, stripped
from vitwire_server.towers.layouts.heads import Deepstack, Head
from vitwire_server.towers.layouts.packed import AttentionSpan, Inputs, PackedFamily
from vitwire_server.towers.processors.settings import AreaRule
from vitwire_server.towers.shared.parts import projector, stock, variant

_OUT = "vision_config.out_hidden_size"
_VISUAL = in_model("visual.")
_THINKER = stripped("thinker.visual.", "thinker.model.visual.", "model.visual.", "visual.")
_WINDOWS = Served(
    "window_size",
    lambda pixels, vision: pixels >= vision.patch_size * vision.spatial_merge_size,
    "at least the pixels of one token's side, patch_size * spatial_merge_size",
)
_COSMOS = ("blocks.", "merger.", "patch_embed.", "pos_embed.", "deepstack_merger_list.")
"""Beginnings of the weights of Cosmos 3's tower, which checkpoints hold without a prefix, next to a generator's."""
INTERN = {"interns1_pro": "S1-Pro", "intern_s2_preview": "S2-Preview", "interns2_mobius": "S2-Mobius"}
_MERGER = ((r"^0\.", "merger.linear_fc1."), (r"^2\.", "merger.linear_fc2."))


def _hyperclova_config(_: Path, settings: Mapping[str, Any]) -> Config:
    """NAVER's config.json says `vlm`, and has the whole Qwen2.5-VL's name for the tower's."""
    require("vision_config.model_type", settings["vision_config"].get("model_type"), "qwen2_5_vl", "qwen2_5_vl_vision")
    require("mm_projector_type", settings.get("mm_projector_type", "linear"), "linear")
    return new_config("hyperclovax_vision_v2", **deepcopy(dict(settings)))


def _fields_of(model_type: str) -> ReadConfig:
    """Reads `vision_config`, which may be within `vlm_config`, as this model's, whatever types config.json has."""
    return lambda _, own: new_config(
        model_type, vision_config=dict(own.get("vlm_config", own)["vision_config"]), dtype=dtype_of(own)
    )


class BailingVision(Qwen3_5VisionModel):
    """Qwen3.5's, with a projector in place of the layers of its merger: as many inner columns as a row has."""

    def __init__(self, config: Qwen3_5VisionConfig) -> None:
        super().__init__(config)
        merger, width = self.merger, config.out_hidden_size
        merger.linear_fc1, merger.linear_fc2 = nn.Linear(merger.hidden_size, width), nn.Linear(width, width)


_QWEN2_VL = PackedFamily(
    "qwen2_vl",
    "Qwen2-VL",
    video_processor="Qwen2VL",
    tower=stock("qwen2_vl.Qwen2VisionTransformerPretrainedModel", _VISUAL),
    width="vision_config.hidden_size",
)

_QWEN2_5_VL = variant(
    _QWEN2_VL,
    "qwen2_5_vl",
    "Qwen2.5-VL",
    tower=stock("qwen2_5_vl.Qwen2_5_VisionTransformerPretrainedModel", _VISUAL, served=(_WINDOWS,)),
    width=_OUT,
    span=AttentionSpan.WINDOWS,
)

_QWEN3_VL = PackedFamily(
    "qwen3_vl",
    "Qwen3-VL",
    video_processor="Qwen3VL",
    tower=stock("qwen3_vl.Qwen3VLVisionModel", _VISUAL),
    width=_OUT,
    head=Deepstack,
    inputs=Inputs(learned_positions=""),
    video_areas=AreaRule(pixels=(128 * 32 * 32, 768 * 32 * 32), spans_frames=True),
)

_QWEN3_5 = variant(_QWEN3_VL, "qwen3_5", "Qwen3.5, Qwen3.6", "qwen3_5.Qwen3_5VisionModel", head=Head)

_QWEN2_5_THINKER = variant(
    _QWEN2_5_VL,
    "qwen2_5_omni_thinker",
    "Qwen2.5-Omni (thinker alone)",
    tower=stock("qwen2_5_omni.Qwen2_5OmniVisionEncoder", _THINKER, served=(_WINDOWS,)),
)

_QWEN3_THINKER = variant(
    _QWEN3_VL,
    "qwen3_omni_moe_thinker",
    "Qwen3-Omni (thinker alone)",
    video_processor="Qwen2VL",
    tower=stock("qwen3_omni_moe.Qwen3OmniMoeVisionEncoder", _THINKER),
    video_areas=AreaRule(pixels=(128 * 28 * 28, 768 * 28 * 28)),
)


def _whole(thinker: PackedFamily, model_type: str, title: str) -> PackedFamily:
    """The row of an Omni model, of which the thinker is a part."""
    tower = replace(thinker.tower, config="thinker_config.vision_config")
    return variant(thinker, model_type, title, tower=tower, width=f"thinker_config.{_OUT}")


_HYPERCLOVA = variant(
    _QWEN2_5_VL,
    "hyperclovax_vision_v2",
    "HyperCLOVA X SEED Think",
    configuration=_hyperclova_config,
    tower=replace(_QWEN2_5_VL.tower, prefixes=in_model("vision_model.")),
    beside=projector(
        nn.Linear,
        in_model("projector.", "vision_projector."),
        arguments=lambda config: (config.vision_config.out_hidden_size, config.text_config.hidden_size),
    ),
    width="text_config.hidden_size",
    transformers="5.23.0",
)

ROWS = (
    _QWEN2_VL,
    _QWEN2_5_VL,
    _QWEN3_VL,
    variant(_QWEN3_VL, "qwen3_vl_moe", "Qwen3-VL MoE", "qwen3_vl_moe.Qwen3VLMoeVisionModel"),
    _QWEN3_5,
    variant(_QWEN3_5, "qwen3_5_moe", "Qwen3.5 MoE, Qwen3.6 MoE", "qwen3_5_moe.Qwen3_5MoeVisionModel"),
    variant(_QWEN3_5, "qwen4_exp", "Qwen4 (experimental)", "qwen4_exp.Qwen4ExpVisionModel", transformers="5.23.0"),
    _whole(_QWEN2_5_THINKER, "qwen2_5_omni", "Qwen2.5-Omni"),
    _QWEN2_5_THINKER,
    _whole(_QWEN3_THINKER, "qwen3_omni_moe", "Qwen3-Omni"),
    _QWEN3_THINKER,
    _QWEN2_VL.nested(
        "vlm.",
        "colqwen2",
        "ColQwen2",
        configuration=_fields_of("qwen2_vl"),
        videos=Accepts.NOTHING,
        transformers="5.23.0",
    ),
    _HYPERCLOVA,
    replace(_HYPERCLOVA, model_type="vlm"),
    variant(
        _QWEN3_VL,
        "cosmos3_omni",
        "Cosmos 3 (reasoner)",
        tower=replace(_QWEN3_VL.tower, prefixes={**_VISUAL, **{name: name for name in _COSMOS}}),
        transformers="5.23.0",
    ),
    variant(
        _QWEN3_VL, "cohere_compass", "Cohere Compass", "cohere_compass.CohereCompassVisionModel", transformers="5.23.0"
    ),
    *(variant(_QWEN3_5, name, f"Intern-{own}", configuration=_fields_of("qwen3_5")) for name, own in INTERN.items()),
    variant(
        _QWEN3_5,
        "bailing_moe_v3_vl",
        "Ling 3.0 VL",
        configuration=lambda at, own: changed(
            _fields_of("qwen3_5")(at, own), {_OUT: own["text_config"]["hidden_size"]}
        ),
        tower=stock(BailingVision, in_model("visual.", "linear_proj."), renames=_MERGER),
        videos=Accepts.NOTHING,
    ),
    variant(
        _QWEN2_5_VL,
        "opencua",
        "OpenCUA",
        configuration=_fields_of("qwen2_5_vl"),
        tower=replace(_QWEN2_5_VL.tower, prefixes=in_model("vision_tower.", "visual.")),
        videos=Accepts.NOTHING,
    ),
    _QWEN3_VL.nested(
        "vlm.",
        "alpamayo2_super",
        "Alpamayo 2 Super",
        configuration=_fields_of("qwen3_vl"),
        images=Accepts.PIXELS,
        videos=Accepts.NOTHING,
    ),
)
