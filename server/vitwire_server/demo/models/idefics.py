"""Demo models of Idefics 2, Idefics 3 and SmolVLM."""

from collections.abc import Mapping

from vitwire_server.demo.demo_model import HALF, TEXT, VISION, DemoModel, demo_vlm

_TOWER = {**VISION, "image_size": 56, "patch_size": 14}
_IMAGE = {
    **HALF,
    "do_image_splitting": True,
    "do_pad": True,
    "max_image_size": {"longest_edge": 56},
    "resample": 1,
    "size": {"longest_edge": 224},
}
_FIELDS = {"image_token_id": 500, "scale_factor": 2}

IDEFICS: Mapping[str, DemoModel] = {
    "idefics2": demo_vlm(
        text={"model_type": "mistral", **TEXT, "pad_token_id": 0},
        vision={"model_type": "idefics2_vision", **VISION, "image_size": 112, "patch_size": 14},
        image={
            **HALF,
            "do_image_splitting": False,
            "do_pad": True,
            "image_processor_type": "Idefics2ImageProcessor",
            "resample": 2,
            "size": {"longest_edge": 224, "shortest_edge": 56},
        },
        fields={
            "image_token_id": 500,
            "perceiver_config": {
                "hidden_size": 64,
                "num_key_value_heads": 2,
                "resampler_depth": 2,
                "resampler_head_dim": 16,
                "resampler_n_heads": 4,
                "resampler_n_latents": 4,
            },
        },
    ),
    "idefics3": demo_vlm(
        text={"model_type": "llama", **TEXT, "pad_token_id": 0},
        vision={"model_type": "idefics3_vision", **_TOWER},
        image={**_IMAGE, "image_processor_type": "Idefics3ImageProcessor"},
        fields=_FIELDS,
    ),
    "smolvlm": demo_vlm(
        text={"model_type": "llama", **TEXT, "pad_token_id": 0},
        vision={"model_type": "smolvlm_vision", **_TOWER, "image_size": 60},
        image={
            **_IMAGE,
            "image_processor_type": "SmolVLMImageProcessor",
            "max_image_size": {"longest_edge": 60},
            "size": {"longest_edge": 240},
            "video_sampling": {"fps": 1, "max_frames": 64, "video_size": {"longest_edge": 60}},
        },
        fields=_FIELDS,
    ),
}
"""By `model_type`. SmolVLM2's tiles have four pixels that no patch covers, as those of its largest model have six."""
