"""Demo models of LLaVA's kind: CLIP's or SigLIP's tower, and a projector."""

from collections.abc import Mapping

from vitwire_server.demo.demo_model import CLIP, TEXT, VISION, DemoModel, demo_vlm

_LLAMA = {"model_type": "llama", **TEXT}
_CLIP = {"model_type": "clip_vision_model", **VISION, "image_size": 56, "patch_size": 14}
_CUT = {"image_grid_pinpoints": [[56 * h, 56 * w] for h in (1, 2, 3) for w in (1, 2, 3)]}
_CROPPED = {
    **CLIP,
    "crop_size": {"height": 56, "width": 56},
    "do_center_crop": True,
    "resample": 3,
    "size": {"shortest_edge": 56},
}

LLAVA: Mapping[str, DemoModel] = {
    "llava_next": demo_vlm(
        text=_LLAMA,
        vision=_CLIP,
        image={**_CROPPED, **_CUT, "do_pad": True, "image_processor_type": "LlavaNextImageProcessor"},
        fields={"image_token_index": 500, **_CUT},
    ),
}
