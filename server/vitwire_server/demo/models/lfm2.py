"""Demo model of LFM2-VL."""

from collections.abc import Mapping

from vitwire_server.demo.demo_model import HALF, TEXT, VISION, DemoModel, demo_vlm

LFM2: Mapping[str, DemoModel] = {
    "lfm2_vl": demo_vlm(
        text={
            "model_type": "lfm2",
            **TEXT,
            "block_auto_adjust_ff_dim": False,
            "layer_types": ["conv", "full_attention", "conv"],
            "pad_token_id": 0,
        },
        vision={
            "model_type": "siglip2_vision_model",
            **VISION,
            "num_patches": 64,
            "patch_size": 14,
            "vision_use_head": False,
        },
        image={
            **HALF,
            "do_image_splitting": True,
            "downsample_factor": 2,
            "encoder_patch_size": 14,
            "image_processor_type": "Lfm2VlImageProcessor",
            "max_image_tokens": 64,
            "max_tiles": 6,
            "min_image_tokens": 4,
            "min_tiles": 2,
            "resample": 2,
            "tile_size": 112,
            "use_thumbnail": True,
        },
        fields={"image_token_id": 500, "downsample_factor": 2, "projector_hidden_size": 96},
    ),
}
"""By `model_type`."""
