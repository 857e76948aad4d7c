"""Qwen's vision towers, the Omni models' included (Alibaba)."""

from dataclasses import replace

from vitwire_server.towers.family import Accepts, Family, Module, in_model, stripped
from vitwire_server.towers.layouts.heads import Deepstack, Head
from vitwire_server.towers.layouts.packed import AttentionSpan, Inputs, PackedFamily
from vitwire_server.towers.processors.areas import AreaRule
from vitwire_server.towers.served import Served

_OUT = "vision_config.out_hidden_size"
_VISUAL = in_model("visual.")
_THINKER = stripped("thinker.visual.", "thinker.model.visual.", "model.visual.", "visual.")
_WINDOWS = Served(
    "window_size",
    lambda pixels, vision: pixels >= vision.patch_size * vision.spatial_merge_size,
    "at least the pixels of one token's side, patch_size * spatial_merge_size",
)


_QWEN2_VL = PackedFamily(
    model_type="qwen2_vl",
    title="Qwen2-VL",
    tower=Module(source="qwen2_vl.modeling_qwen2_vl:Qwen2VisionTransformerPretrainedModel", prefixes=_VISUAL),
    width="vision_config.hidden_size",
    architecture="32 x 1280, patch 14",
    attention="per frame",
)


QWEN2_5_VL = PackedFamily(
    model_type="qwen2_5_vl",
    title="Qwen2.5-VL",
    tower=Module(
        source="qwen2_5_vl.modeling_qwen2_5_vl:Qwen2_5_VisionTransformerPretrainedModel",
        prefixes=_VISUAL,
        served=(_WINDOWS,),
    ),
    width=_OUT,
    span=AttentionSpan.WINDOWS,
    architecture="32 x 1280, patch 14, SwiGLU",
    attention="within windows, full in some layers",
)


QWEN3_VL = PackedFamily(
    model_type="qwen3_vl",
    title="Qwen3-VL",
    tower=Module(source="qwen3_vl.modeling_qwen3_vl:Qwen3VLVisionModel", prefixes=_VISUAL),
    width=_OUT,
    head=Deepstack,
    inputs=Inputs(learned_positions=""),
    video_areas=AreaRule(pixels=(128 * 32 * 32, 768 * 32 * 32), spans_frames=True),
    architecture="27 x 1152 or 24 x 1024, patch 16",
    attention="per frame",
    special="deepstack: rows are `[main, 0, 1, 2]`",
)


_QWEN3_VL_MOE = replace(
    QWEN3_VL,
    model_type="qwen3_vl_moe",
    title="Qwen3-VL MoE",
    tower=Module(source="qwen3_vl_moe.modeling_qwen3_vl_moe:Qwen3VLMoeVisionModel", prefixes=_VISUAL),
)


_QWEN3_5 = replace(
    QWEN3_VL,
    model_type="qwen3_5",
    title="Qwen3.5, Qwen3.6",
    tower=Module(source="qwen3_5.modeling_qwen3_5:Qwen3_5VisionModel", prefixes=_VISUAL),
    head=Head,
    special="Qwen3-VL without deepstack",
)


_QWEN3_5_MOE = replace(
    _QWEN3_5,
    model_type="qwen3_5_moe",
    title="Qwen3.5 MoE, Qwen3.6 MoE",
    tower=Module(source="qwen3_5_moe.modeling_qwen3_5_moe:Qwen3_5MoeVisionModel", prefixes=_VISUAL),
)


_QWEN4_EXP = replace(
    _QWEN3_5,
    model_type="qwen4_exp",
    title="Qwen4 (experimental)",
    tower=Module(source="qwen4_exp.modeling_qwen4_exp:Qwen4ExpVisionModel", prefixes=_VISUAL),
    transformers="5.23.0",
)


_QWEN2_5_OMNI = replace(
    QWEN2_5_VL,
    model_type="qwen2_5_omni",
    title="Qwen2.5-Omni",
    tower=Module(
        source="qwen2_5_omni.modeling_qwen2_5_omni:Qwen2_5OmniVisionEncoder",
        prefixes=_THINKER,
        served=(_WINDOWS,),
        config="thinker_config.vision_config",
    ),
    width="thinker_config.vision_config.out_hidden_size",
    special="the thinker's tower; audio stays with the LLM",
)


_QWEN2_5_OMNI_THINKER = replace(
    _QWEN2_5_OMNI,
    model_type="qwen2_5_omni_thinker",
    title="Qwen2.5-Omni (thinker alone)",
    tower=replace(_QWEN2_5_OMNI.tower, config="vision_config"),
    width=_OUT,
)


_QWEN3_OMNI = replace(
    QWEN3_VL,
    model_type="qwen3_omni_moe",
    title="Qwen3-Omni",
    tower=Module(
        source="qwen3_omni_moe.modeling_qwen3_omni_moe:Qwen3OmniMoeVisionEncoder",
        prefixes=_THINKER,
        config="thinker_config.vision_config",
    ),
    width="thinker_config.vision_config.out_hidden_size",
    video_areas=AreaRule(pixels=(128 * 28 * 28, 768 * 28 * 28)),
    special="the thinker's tower, with deepstack; audio stays with the LLM",
)


_QWEN3_OMNI_THINKER = replace(
    _QWEN3_OMNI,
    model_type="qwen3_omni_moe_thinker",
    title="Qwen3-Omni (thinker alone)",
    tower=replace(_QWEN3_OMNI.tower, config="vision_config"),
    width=_OUT,
)


_COLQWEN2 = replace(
    _QWEN2_VL,
    model_type="colqwen2",
    title="ColQwen2",
    tower=replace(
        _QWEN2_VL.tower, prefixes=stripped("vlm.visual.", "vlm.model.visual."), config="vlm_config.vision_config"
    ),
    width="vlm_config.vision_config.hidden_size",
    videos=Accepts.NOTHING,
    transformers="5.23.0",
    special="rows of the tower, which the retrieval model reads",
)


ROWS: tuple[Family, ...] = (
    _QWEN2_VL,
    QWEN2_5_VL,
    QWEN3_VL,
    _QWEN3_VL_MOE,
    _QWEN3_5,
    _QWEN3_5_MOE,
    _QWEN4_EXP,
    _QWEN2_5_OMNI,
    _QWEN2_5_OMNI_THINKER,
    _QWEN3_OMNI,
    _QWEN3_OMNI_THINKER,
    _COLQWEN2,
)
