"""The demo model of Granite for Docling."""

from collections.abc import Mapping

from vitwire_server.demo.demo_model import CLIP, TEXT, VISION, DemoModel, demo_vlm

GRANITE_DOCLING: Mapping[str, DemoModel] = {
    "granite_docling": demo_vlm(
        text={
            "model_type": "granite_docling_text",
            **TEXT,
            "pad_token_id": 0,
            "tie_word_embeddings": False,
        },
        vision={
            "model_type": "granite_docling_vision",
            **VISION,
            "deepstack_visual_indexes": [0, 1],
            "image_size": 112,
            "out_hidden_size": 64,
            "patch_size": 14,
            "scale_factor": 4,
        },
        image={
            **CLIP,
            "crop_to_patches": True,
            "image_processor_type": "GraniteDoclingImageProcessor",
            "max_patches": 20,
            "min_patches": 1,
            "resample": 3,
            "size": {"height": 112, "width": 112},
        },
        fields={
            "image_token_id": 500,
            "density_router_hidden_size": 16,
            "pad_token_id": 0,
            "tie_word_embeddings": False,
        },
    ),
}
"""By `model_type`."""
