"""GLM's vision towers (Z.ai)."""

from dataclasses import replace

from vitwire_server.towers.family import Accepts, Family, Module, in_model
from vitwire_server.towers.layouts.packed import Inputs, PackedFamily
from vitwire_server.towers.processors.areas import AreaRule

_VISUAL = in_model("visual.")


_GLM4V = PackedFamily(
    model_type="glm4v",
    title="GLM-4.1V",
    tower=Module(source="glm4v.modeling_glm4v:Glm4vVisionModel", prefixes=_VISUAL),
    width="vision_config.out_hidden_size",
    inputs=Inputs(grids=True),
    image_areas=AreaRule(spans_frames=True),
    video_areas=AreaRule(pixels=(128 * 28 * 28, 768 * 28 * 28), spans_frames=True),
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
    inputs=Inputs(),
    architecture="24 x 1024, patch 14",
    special="no learned positions",
)


_GLMGA = replace(
    _GLM46V,
    model_type="glmga",
    title="GLM-GA",
    images=Accepts.PIXELS,
    videos=Accepts.PIXELS,
    transformers="5.23.0",
)


_GLM5_NEXT = replace(
    _GLM_OCR,
    model_type="glm5_next",
    title="GLM-5.3 Flash",
    tower=Module(source="glm5_next.modeling_glm5_next:Glm5NextVisionModel", prefixes=_VISUAL),
    images=Accepts.PIXELS,
    videos=Accepts.PIXELS,
    transformers="5.23.0",
    special="no learned positions; its processor pads images",
)


ROWS: tuple[Family, ...] = (_GLM4V, _GLM46V, _GLM4V_MOE, _GLM_OCR, _GLMGA, _GLM5_NEXT)
