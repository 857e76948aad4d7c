"""Demo models whose rows depend on the layout of an image's tiles."""

from collections.abc import Mapping
from dataclasses import replace

from transformers import AutoModelForCausalLM

from vitwire_server.demo.demo_model import HALF, STEPS, TEXT, VISION, DemoModel, demo_vlm
from vitwire_server.demo.saving import save_phi4mm

_PHI4_FILES = {
    "preprocessor_config.json": {
        **STEPS,
        **HALF,
        "dynamic_hd": 36,
        "image_processor_type": "Phi4MultimodalImageProcessor",
        "patch_size": 14,
        "resample": 3,
        "size": {"height": 112, "width": 112},
    }
}
_PHI4 = DemoModel(
    config={
        **TEXT,
        "audio_config": {
            "audio_token_id": 501,
            "depthwise_separable_out_channel": 16,
            "ext_pw_out_channel": 16,
            "hidden_size": 16,
            "intermediate_size": 24,
            "nemo_conv_channels": 16,
            "num_attention_heads": 2,
            "num_blocks": 1,
        },
        "pad_token_id": 0,
        "vision_config": {**VISION, "crop_size": 112, "image_size": 112, "image_token_id": 500, "patch_size": 14},
    },
    files=lambda _: _PHI4_FILES,
    auto=AutoModelForCausalLM,
)

_MLLAMA = demo_vlm(
    text={
        **TEXT,
        "cross_attention_layers": [1],
        "pad_token_id": 0,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    vision={
        "attention_heads": 4,
        "hidden_size": 64,
        "image_size": 56,
        "intermediate_layers_indices": [0, 2],
        "intermediate_size": 96,
        "num_global_layers": 2,
        "num_hidden_layers": 3,
        "patch_size": 14,
        "vision_output_dim": 192,
    },
    image={
        **HALF,
        "do_pad": True,
        "image_processor_type": "MllamaImageProcessor",
        "max_image_tiles": 4,
        "resample": 2,
        "size": {"height": 56, "width": 56},
    },
    fields={"image_token_index": 500},
)

_ARIA = demo_vlm(
    text={
        **TEXT,
        "head_dim": 16,
        "intermediate_size": 32,
        "moe_num_experts": 2,
        "moe_num_shared_experts": 1,
        "moe_topk": 1,
        "pad_token_id": 0,
    },
    vision={"model_type": "idefics3_vision", **VISION, "image_size": 490, "patch_size": 49},
    image={
        **HALF,
        "do_resize": False,
        "image_processor_type": "AriaImageProcessor",
        "max_image_size": 490,
        "min_image_size": 168,
        "resample": 3,
    },
    fields={"image_token_index": 500, "projector_patch_to_query_dict": {"25": 4, "100": 8}},
)

ASSEMBLED: Mapping[str, DemoModel] = {
    "aria": _ARIA,
    "mllama": _MLLAMA,
    "phi4_multimodal": _PHI4,
    "phi4mm": replace(_PHI4, base="phi4_multimodal", save=save_phi4mm),
}
