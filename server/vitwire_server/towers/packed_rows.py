"""Rows of towers that take packed patches and `grid_thw`."""

from dataclasses import replace

from vitwire_server.towers.family import Module, stripped
from vitwire_server.towers.kimi import KimiVL, unfused
from vitwire_server.towers.packed import PackedFamily
from vitwire_server.towers.projected import ErnieTower, KimiTower, PaddleTower, ProjectedTower

_VISUAL = stripped("model.visual.", "visual.")
_THINKER = stripped("thinker.visual.", "thinker.model.visual.", "model.visual.", "visual.")
_TOWER = stripped("model.vision_tower.", "vision_tower.")
_OUT = "vision_config.out_hidden_size"
_TEXT = "text_config.hidden_size"

_QWEN2_VL = PackedFamily(
    model_type="qwen2_vl",
    title="Qwen2-VL",
    tower=Module(source="qwen2_vl.modeling_qwen2_vl:Qwen2VisionTransformerPretrainedModel", prefixes=_VISUAL),
    width="vision_config.hidden_size",
    architecture="32 x 1280, patch 14",
    attention="per frame",
)
_QWEN2_5_VL = PackedFamily(
    model_type="qwen2_5_vl",
    title="Qwen2.5-VL",
    tower=Module(source="qwen2_5_vl.modeling_qwen2_5_vl:Qwen2_5_VisionTransformerPretrainedModel", prefixes=_VISUAL),
    width=_OUT,
    windows=True,
    architecture="32 x 1280, patch 14, SwiGLU",
    attention="within windows, full in some layers",
)
_QWEN3_VL = PackedFamily(
    model_type="qwen3_vl",
    title="Qwen3-VL",
    tower=Module(source="qwen3_vl.modeling_qwen3_vl:Qwen3VLVisionModel", prefixes=_VISUAL),
    width=_OUT,
    positions="",
    deepstack=True,
    video_pixels=(128 * 32 * 32, 768 * 32 * 32),
    videos_span_frames=True,
    architecture="27 x 1152 or 24 x 1024, patch 16",
    attention="per frame",
    special="deepstack: rows are `[main, 0, 1, 2]`",
)
_QWEN3_VL_MOE = replace(
    _QWEN3_VL,
    model_type="qwen3_vl_moe",
    title="Qwen3-VL MoE",
    tower=Module(source="qwen3_vl_moe.modeling_qwen3_vl_moe:Qwen3VLMoeVisionModel", prefixes=_VISUAL),
)
_QWEN3_5 = replace(
    _QWEN3_VL,
    model_type="qwen3_5",
    title="Qwen3.5, Qwen3.6",
    tower=Module(source="qwen3_5.modeling_qwen3_5:Qwen3_5VisionModel", prefixes=_VISUAL),
    deepstack=False,
    special="Qwen3-VL without deepstack",
)
_QWEN3_5_MOE = replace(
    _QWEN3_5,
    model_type="qwen3_5_moe",
    title="Qwen3.5 MoE, Qwen3.6 MoE",
    tower=Module(source="qwen3_5_moe.modeling_qwen3_5_moe:Qwen3_5MoeVisionModel", prefixes=_VISUAL),
)

_QWEN2_5_OMNI = replace(
    _QWEN2_5_VL,
    model_type="qwen2_5_omni",
    title="Qwen2.5-Omni",
    tower=Module(
        source="qwen2_5_omni.modeling_qwen2_5_omni:Qwen2_5OmniVisionEncoder",
        prefixes=_THINKER,
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
    _QWEN3_VL,
    model_type="qwen3_omni_moe",
    title="Qwen3-Omni",
    tower=Module(
        source="qwen3_omni_moe.modeling_qwen3_omni_moe:Qwen3OmniMoeVisionEncoder",
        prefixes=_THINKER,
        config="thinker_config.vision_config",
    ),
    width="thinker_config.vision_config.out_hidden_size",
    video_pixels=(128 * 28 * 28, 768 * 28 * 28),
    videos_span_frames=False,
    special="the thinker's tower, with deepstack; audio stays with the LLM",
)
_QWEN3_OMNI_THINKER = replace(
    _QWEN3_OMNI,
    model_type="qwen3_omni_moe_thinker",
    title="Qwen3-Omni (thinker alone)",
    tower=replace(_QWEN3_OMNI.tower, config="vision_config"),
    width=_OUT,
)

_GLM4V = PackedFamily(
    model_type="glm4v",
    title="GLM-4.1V",
    tower=Module(source="glm4v.modeling_glm4v:Glm4vVisionModel", prefixes=_VISUAL),
    width=_OUT,
    reads_grids=True,
    images_span_frames=True,
    videos_span_frames=True,
    architecture="24 x 1536, patch 14",
    attention="per frame",
    special="learned positions, resampled on the device",
)
_GLM46V = replace(_GLM4V, model_type="glm46v", title="GLM-4.6V")
_GLM4V_MOE = replace(
    _GLM4V,
    model_type="glm4v_moe",
    title="GLM-4.5V, GLM-4.6V MoE",
    tower=Module(source="glm4v_moe.modeling_glm4v_moe:Glm4vMoeVisionModel", prefixes=_VISUAL),
)
_GLM_OCR = replace(
    _GLM4V,
    model_type="glm_ocr",
    title="GLM-OCR",
    tower=Module(source="glm_ocr.modeling_glm_ocr:GlmOcrVisionModel", prefixes=_VISUAL),
    reads_grids=False,
    architecture="24 x 1024, patch 14",
    special="no learned positions",
)

_KIMI_TOWER = Module(
    source="kimi_k25.modeling_kimi_k25:Kimi_K25VisionModel",
    prefixes=_TOWER,
    renames=(
        (r"^encoder\.blocks\.(\d+)\.mlp\.fc1\.", r"layers.\1.mlp.fc2."),
        (r"^encoder\.blocks\.(\d+)\.mlp\.fc0\.", r"layers.\1.mlp.fc1."),
        (r"^encoder\.blocks\.(\d+)\.norm1\.", r"layers.\1.norm2."),
        (r"^encoder\.blocks\.(\d+)\.norm0\.", r"layers.\1.norm1."),
        (r"^encoder\.blocks\.(\d+)\.wo\.", r"layers.\1.attn.proj."),
        (r"^encoder\.blocks\.(\d+)\.wqkv\.", r"layers.\1.attn.wqkv."),
        (r"^encoder\.", ""),
        (r"^patch_embed\.pos_emb\.weight$", "patch_embed.pos_emb.position_embeddings"),
    ),
    ignored=("patch_embed.pos_emb.time_",),
    convert=unfused,
)
_KIMI_K25 = PackedFamily(
    model_type="kimi_k25",
    title="Kimi K2.5, K2.6",
    tower=_KIMI_TOWER,
    beside={
        "projector": Module(
            source="kimi_k25.modeling_kimi_k25:Kimi_K25MultimodalProjection",
            prefixes=stripped("model.mm_projector.", "mm_projector."),
            renames=((r"^proj\.0\.", "in_proj."), (r"^proj\.2\.", "out_proj.")),
            config="",
        )
    },
    adapter=KimiTower,
    width=_TEXT,
    positions="patch_embed.pos_emb",
    layers="layers",
    whole_clips=True,
    raster=True,
    prepared=False,
    prepared_videos=False,
    architecture="27 x 1152, patch 14",
    pooled=True,
    attention="over a chunk of up to 4 frames",
    special="frames of a chunk are averaged, so a chunk has the tokens of one frame; projector",
)
_KIMI_VL = KimiVL(
    model_type="kimi_vl",
    title="Kimi-VL",
    tower=_KIMI_TOWER,
    beside={
        "projector": Module(
            source="kimi_k25.modeling_kimi_k25:Kimi_K25MultimodalProjection",
            prefixes=stripped("multi_modal_projector."),
            renames=((r"^linear_1\.", "in_proj."), (r"^linear_2\.", "out_proj.")),
            config="",
        )
    },
    adapter=KimiTower,
    width=_TEXT,
    positions="patch_embed.pos_emb",
    layers="layers",
    whole_clips=True,
    raster=True,
    prepared=False,
    videos=False,
    architecture="27 x 1152, patch 14",
    attention="full",
    special="MoonViT, through the classes of Kimi K2.5; projector",
)

_PADDLE = PackedFamily(
    model_type="paddleocr_vl",
    title="PaddleOCR-VL",
    tower=Module(
        source="paddleocr_vl.modeling_paddleocr_vl:PaddleOCRVisionModel",
        prefixes=_VISUAL,
        ignored=("vision_model.head.", "vision_model.embeddings.packing_position_embedding."),
    ),
    beside={
        "projector": Module(
            source="paddleocr_vl.modeling_paddleocr_vl:PaddleOCRProjector",
            prefixes=stripped("model.projector.", "mlp_AR."),
            config="",
        )
    },
    adapter=PaddleTower,
    width=_TEXT,
    positions="vision_model.embeddings",
    layers="vision_model.encoder.layers",
    raster=True,
    videos=False,
    architecture="27 x 1152, patch 14",
    attention="full",
    special="patches in raster order; projector",
    transformers="5.23.0",
)
_MINIMAX = PackedFamily(
    model_type="minimax_m3_vl",
    title="MiniMax M3-VL",
    tower=Module(
        source="minimax_m3_vl.modeling_minimax_m3_vl:MiniMaxM3VLVisionModel",
        prefixes=_TOWER,
        renames=(
            (r"^vision_model\.embeddings\.patch_embedding\.", "embeddings.proj."),
            (r"^vision_model\.(encoder\.)?", ""),
        ),
    ),
    beside={
        "projector": Module(
            source="minimax_m3_vl.modeling_minimax_m3_vl:MiniMaxM3VLMultiModalProjector",
            prefixes=stripped("model.multi_modal_projector.", "multi_modal_projector.")
            | {"patch_merge_mlp.": "merge_"},
            config="",
        )
    },
    adapter=ProjectedTower,
    width=_TEXT,
    layers="layers",
    whole_clips=True,
    counts_frames=True,
    prepared_videos=False,
    image_pixels=(4 * 28 * 28, 451584),
    architecture="32 x 1280, patch 14",
    attention="over whole clips",
    special="positions in time, height and width; clips come in chunks of 4 groups of frames; projector",
    transformers="5.23.0",
)
_ERNIE = PackedFamily(
    model_type="ernie4_5_vl_moe",
    title="ERNIE 4.5 VL",
    tower=Module(
        source="ernie4_5_vl_moe.modeling_ernie4_5_vl_moe:Ernie4_5_VLMoeVisionTransformerPretrainedModel",
        prefixes=stripped("model.vision_tower.", "vision_tower.", "vision_model.", "model.vision_model."),
    ),
    beside={
        "projector": Module(
            source="ernie4_5_vl_moe.modeling_ernie4_5_vl_moe:Ernie4_5_VLMoeVariableResolutionResamplerModel",
            prefixes=stripped("model.resampler_model.", "resampler_model."),
            renames=(
                (r"_linear\.0\.", "_linear.fc1."),
                (r"_linear\.2\.", "_linear.fc2."),
                (r"_linear\.3\.", "_linear.ln."),
            ),
            config="",
        )
    },
    adapter=ErnieTower,
    width=_TEXT,
    prepared_videos=False,
    architecture="32 x 1280, patch 14",
    pooled=True,
    attention="per frame",
    special="a resampler makes one token of two frames; clips have an even number of frames",
)

PACKED_ROWS = (
    _QWEN2_VL,
    _QWEN2_5_VL,
    _QWEN3_VL,
    _QWEN3_VL_MOE,
    _QWEN3_5,
    _QWEN3_5_MOE,
    _QWEN2_5_OMNI,
    _QWEN2_5_OMNI_THINKER,
    _QWEN3_OMNI,
    _QWEN3_OMNI_THINKER,
    _GLM4V,
    _GLM46V,
    _GLM4V_MOE,
    _GLM_OCR,
    _KIMI_K25,
    _KIMI_VL,
    _PADDLE,
    _MINIMAX,
    _ERNIE,
)
