"""Demo models of LLaVA's kind: CLIP's or SigLIP's tower, and a projector."""

from collections.abc import Mapping

from vitwire_server.demo.demo_model import CLIP, HALF, TEXT, VISION, DemoModel, demo_vlm

_LLAMA = {"model_type": "llama", **TEXT}
_QWEN2 = {"model_type": "qwen2", **TEXT}
_COHERE2 = {"model_type": "cohere2", **TEXT, "pad_token_id": 0}
_CLIP = {"model_type": "clip_vision_model", **VISION, "image_size": 56, "patch_size": 14}
_SIGLIP = {
    "model_type": "siglip_vision_model",
    **VISION,
    "image_size": 56,
    "patch_size": 14,
    "vision_use_head": False,
}
_CUT = {"image_grid_pinpoints": [[56 * h, 56 * w] for h in (1, 2, 3) for w in (1, 2, 3)]}
_SEVERAL = {"image_grid_pinpoints": _CUT["image_grid_pinpoints"][1:]}
_CROPPED = {
    **CLIP,
    "crop_size": {"height": 56, "width": 56},
    "do_center_crop": True,
    "resample": 3,
    "size": {"shortest_edge": 56},
}

_SQUARE = {"resample": 3, "size": {"height": 56, "width": 56}}
_STRETCHED = {**HALF, "crop_size": {"height": 56, "width": 56}, **_SQUARE}
_IMAGE_TOKEN = {"image_token_index": 500}

LLAVA: Mapping[str, DemoModel] = {
    "llava": demo_vlm(
        text=_LLAMA,
        vision=_CLIP,
        image={**_CROPPED, "image_processor_type": "LlavaImageProcessor"},
        fields=_IMAGE_TOKEN,
    ),
    "llava-siglip": demo_vlm(
        base="llava",
        text=_QWEN2,
        vision=_SIGLIP,
        image={**_STRETCHED, "image_processor_type": "SiglipImageProcessor"},
        fields={**_IMAGE_TOKEN, "vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
    ),
    "vipllava": demo_vlm(
        text=_LLAMA,
        vision=_CLIP,
        image={**_CROPPED, "image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 60}},
        fields={**_IMAGE_TOKEN, "vision_feature_layer": [-2, -3, 1]},
    ),
    "paligemma": demo_vlm(
        text={"model_type": "gemma2", **TEXT, "head_dim": 16, "query_pre_attn_scalar": 16},
        vision=_SIGLIP,
        image={**HALF, **_SQUARE, "image_processor_type": "SiglipImageProcessor"},
        fields={**_IMAGE_TOKEN, "projection_dim": 64, "tie_word_embeddings": False},
    ),
    "llava_next": demo_vlm(
        text=_LLAMA,
        vision=_CLIP,
        image={**_CROPPED, **_CUT, "do_pad": True, "image_processor_type": "LlavaNextImageProcessor"},
        fields={**_IMAGE_TOKEN, **_CUT},
    ),
    "llava_next_video": demo_vlm(
        text=_QWEN2,
        vision=_CLIP,
        image={**_CROPPED, **_SEVERAL, "do_pad": True, "image_processor_type": "LlavaNextImageProcessor"},
        video={**_CROPPED, "video_processor_type": "LlavaNextVideoVideoProcessor"},
        fields={**_IMAGE_TOKEN, **_SEVERAL, "video_token_index": 501},
    ),
    "llava_next-siglip": demo_vlm(
        base="llava_next",
        text=_LLAMA,
        vision=_SIGLIP,
        image={**_STRETCHED, **_CUT, "do_pad": True, "image_processor_type": "LlavaNextImageProcessor"},
        fields={
            **_IMAGE_TOKEN,
            **_CUT,
            "vision_feature_layer": [-3, -2, 0, -1],
            "vision_feature_select_strategy": "full",
        },
    ),
    "aya_vision": demo_vlm(
        text=_COHERE2,
        vision=_SIGLIP,
        image={**HALF, "image_processor_type": "GotOcr2ImageProcessor", "max_patches": 6, **_SQUARE},
        fields={**_IMAGE_TOKEN, "alignment_intermediate_size": 96},
    ),
    "cohere2_vision": demo_vlm(
        text=_COHERE2,
        vision=_SIGLIP,
        image={**HALF, "image_processor_type": "Cohere2VisionImageProcessor", "max_patches": 6, **_SQUARE},
        fields={"image_token_id": 500, "alignment_intermediate_size": 96},
    ),
}
