"""Demo models of tiles that transformers 5.23 added."""

from collections.abc import Mapping
from types import MappingProxyType

from vitwire_server.demo.demo_model import HALF, IMAGENET, TEXT, VISION, DemoModel, demo_vlm
from vitwire_server.demo.models.tiles import DEEPSEEK_TEXT, INTERNVL_SIZE, INTERNVL_VISION, SAM

TILES_NEWER: Mapping[str, DemoModel] = MappingProxyType(
    {
        "unlimited_ocr": demo_vlm(
            text=DEEPSEEK_TEXT,
            vision={
                "sam_config": {**SAM, "downsample_channels": [24, 32], "image_size": 128, "patch_size": 4},
                "encoder_config": {**VISION, "hidden_size": 32, "image_size": 32, "patch_size": 4},
            },
            image={
                **HALF,
                "background_color": [127, 127, 127],
                "crop_to_patches": True,
                "image_processor_type": "UnlimitedOcrImageProcessor",
                "max_patches": 6,
                "min_patches": 2,
                "resample": 3,
                "size": {"height": 128, "width": 128},
                "tile_size": 96,
            },
        ),
        "qianfan_ocr": demo_vlm(
            text={"model_type": "qwen3", **TEXT, "head_dim": 16},
            vision=INTERNVL_VISION,
            image={
                **IMAGENET,
                **INTERNVL_SIZE,
                "image_processor_type": "GotOcr2ImageProcessor",
                "crop_to_patches": True,
                "min_patches": 1,
                "max_patches": 6,
            },
            fields={"image_token_id": 500, "image_seq_length": 16},
        ),
    }
)
