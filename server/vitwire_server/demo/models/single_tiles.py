"""Demo models whose processors make one tile of an image, with towers of their own kinds."""

from collections.abc import Mapping

from vitwire_server.demo.demo_model import CLIP, HALF, TEXT, VISION, DemoModel, demo_vlm

_SIZE = {"resample": 3, "size": {"height": 128, "width": 128}}

SINGLE_TILES: Mapping[str, DemoModel] = {
    "got_ocr2": demo_vlm(
        text={"model_type": "qwen2", **TEXT},
        vision={
            "global_attn_indexes": [1],
            "hidden_size": 32,
            "image_size": 128,
            "mlp_dim": 48,
            "num_attention_heads": 2,
            "num_hidden_layers": 3,
            "output_channels": 16,
            "window_size": 3,
        },
        image={**CLIP, **_SIZE, "image_processor_type": "GotOcr2ImageProcessor"},
        fields={"image_token_index": 500},
    ),
    "janus": demo_vlm(
        text={"model_type": "llama", **TEXT},
        vision={**VISION, "image_size": 128, "mlp_ratio": 1.5, "projection_dim": 64},
        image={**HALF, **_SIZE, "image_processor_type": "JanusImageProcessor", "min_size": 14},
        fields={
            "image_token_id": 500,
            "vq_config": {
                "base_channels": 32,
                "channel_multiplier": [1, 1],
                "image_token_embed_dim": 64,
                "latent_channels": 32,
                "num_embeddings": 64,
                "num_patches": 8,
                "num_res_blocks": 1,
                "projection_dim": 64,
            },
        },
    ),
}
