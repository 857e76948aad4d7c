"""GLM's vision towers (Z.ai)."""

from typing import Any

from vitwire_server.towers.family import Accepts, in_model
from vitwire_server.towers.layouts.packed import Inputs, PackedFamily
from vitwire_server.towers.processors.settings import AreaRule
from vitwire_server.towers.shared.parts import stock, variant

_GLM4V = PackedFamily(
    "glm4v",
    "GLM-4.1V",
    video_processor="Glm4v",
    tower=stock("glm4v.Glm4vVisionModel", in_model("visual.")),
    width="vision_config.out_hidden_size",
    inputs=Inputs(grids=True),
    image_areas=AreaRule(spans_frames=True),
    video_areas=AreaRule(pixels=(128 * 28 * 28, 768 * 28 * 28), spans_frames=True),
)

_GLM_OCR = variant(_GLM4V, "glm_ocr", "GLM-OCR", "glm_ocr.GlmOcrVisionModel", inputs=Inputs(), video_processor="Glm46V")
_PIXELS: dict[str, Any] = {"images": Accepts.PIXELS, "videos": Accepts.PIXELS, "transformers": "5.23.0"}

ROWS = (
    _GLM4V,
    variant(_GLM4V, "glm46v", "GLM-4.6V", video_processor="Glm46V"),
    variant(_GLM4V, "glm4v_moe", "GLM-4.5V, GLM-4.6V MoE", "glm4v_moe.Glm4vMoeVisionModel"),
    _GLM_OCR,
    variant(_GLM4V, "glmga", "GLM-GA", **_PIXELS),
    variant(_GLM_OCR, "glm5_next", "GLM-5.3 Flash", "glm5_next.Glm5NextVisionModel", **_PIXELS),
)
