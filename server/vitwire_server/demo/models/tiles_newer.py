"""Demo models of tiles of newer generations."""

from collections.abc import Mapping
from types import MappingProxyType

from vitwire_server.demo.demo_model import IMAGENET, TEXT, DemoModel, demo_vlm
from vitwire_server.demo.models.tiles import INTERNVL_SIZE, INTERNVL_VISION

TILES_NEWER: Mapping[str, DemoModel] = MappingProxyType(
    {
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
