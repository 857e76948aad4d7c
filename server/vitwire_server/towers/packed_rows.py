"""Rows of towers that take packed patches and `grid_thw`."""

from dataclasses import replace

from vitwire_server.core.models import Resizing
from vitwire_server.towers.family import Module, in_model, stripped
from vitwire_server.towers.models.kimi import KIMI_ROWS
from vitwire_server.towers.layouts.packed import PackedFamily
from vitwire_server.towers.layouts.projected import ErnieTower, PaddleTower, ProjectedTower
from vitwire_server.towers.models.qwen import QWEN_ROWS
from vitwire_server.towers.served import Served

_VISUAL = in_model("visual.")
_OUT = "vision_config.out_hidden_size"
_TEXT = "text_config.hidden_size"

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
    resizing=Resizing.ENLARGED_AREA,
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
        prefixes=in_model("vision_tower."),
        renames=(
            (r"^vision_model\.embeddings\.patch_embedding\.", "embeddings.proj."),
            (r"^vision_model\.(encoder\.)?", ""),
        ),
    ),
    beside={
        "projector": Module(
            source="minimax_m3_vl.modeling_minimax_m3_vl:MiniMaxM3VLMultiModalProjector",
            prefixes=in_model("multi_modal_projector.") | {"patch_merge_mlp.": "merge_"},
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
        prefixes=in_model("vision_tower.", "vision_model."),
        served=(Served("temporal_merge_size", lambda frames, _: frames == 2, "2"),),
    ),
    beside={
        "projector": Module(
            source="ernie4_5_vl_moe.modeling_ernie4_5_vl_moe:Ernie4_5_VLMoeVariableResolutionResamplerModel",
            prefixes=in_model("resampler_model."),
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

PACKED_ROWS: tuple[PackedFamily, ...] = (
    *QWEN_ROWS,
    _GLM4V,
    _GLM46V,
    _GLM4V_MOE,
    _GLM_OCR,
    *KIMI_ROWS,
    _PADDLE,
    _MINIMAX,
    _ERNIE,
)
