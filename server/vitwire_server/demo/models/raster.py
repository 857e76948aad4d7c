"""Demo models of packed patches without `grid_thw`."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from transformers import AutoModel, PreTrainedModel

from vitwire_server.demo.demo_model import CLIP, HALF, TEXT, VISION, DemoModel, demo_vlm, save_plain

PIXTRAL = {"model_type": "pixtral", **VISION, "head_dim": 16, "image_size": 448, "patch_size": 14}
LONGEST = {
    "image_processor_type": "PixtralImageProcessor",
    "patch_size": 14,
    "resample": 3,
    "size": {"longest_edge": 448},
}

GEMMA4_TEXT = {
    **TEXT,
    "head_dim": 16,
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 0,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "num_kv_shared_layers": 0,
    "vocab_size_per_layer_input": 512,
}
GEMMA4_VISION = {
    "model_type": "gemma4_vision",
    **VISION,
    "head_dim": 16,
    "num_key_value_heads": 4,
    "patch_size": 14,
    "position_embedding_size": 128,
    "standardize": True,
}
GEMMA4_IMAGE = {
    "do_convert_rgb": True,
    "do_normalize": False,
    "do_rescale": True,
    "do_resize": True,
    "image_processor_type": "Gemma4ImageProcessor",
    "max_soft_tokens": 70,
    "patch_size": 14,
    "pooling_kernel_size": 3,
    "resample": 3,
    "rescale_factor": 1 / 255,
}


def save_gemma4(model: PreTrainedModel, out: Path) -> None:
    """With other numbers in the buffers that it standardises by than those that change nothing."""
    for name, buffer in model.named_buffers():
        if name.endswith("std_bias"):
            buffer.fill_(0.25)
        elif name.endswith("std_scale"):
            buffer.fill_(0.5)
    save_plain(model, out)


def _save_pix2struct(model: PreTrainedModel, out: Path) -> None:
    """With small queries, as trained ones are: attention does not scale their products with keys."""
    for name, weight in model.named_parameters():
        if name.endswith("attention.query.weight"):
            weight.data.mul_(0.25)
    save_plain(model, out)


RASTER: Mapping[str, DemoModel] = MappingProxyType(
    {
        "pix2struct": demo_vlm(
            text={
                "bos_token_id": 1,
                "d_ff": 96,
                "d_kv": 16,
                "decoder_start_token_id": 0,
                "eos_token_id": 2,
                "hidden_size": 64,
                "num_heads": 4,
                "num_layers": 2,
                "vocab_size": 512,
            },
            vision={
                "d_ff": 96,
                "d_kv": 16,
                "hidden_size": 64,
                "num_attention_heads": 4,
                "num_hidden_layers": 3,
                "patch_embed_hidden_size": 588,
                "seq_len": 64,
            },
            image={
                "do_normalize": True,
                "image_processor_type": "Pix2StructImageProcessor",
                "is_vqa": False,
                "max_patches": 64,
                "patch_size": {"height": 14, "width": 14},
            },
            fields={"is_vqa": False},
            save=_save_pix2struct,
        ),
        "llava-pixtral": demo_vlm(
            base="llava",
            text={"model_type": "mistral", **TEXT, "head_dim": 16},
            vision=PIXTRAL,
            image={**CLIP, **LONGEST},
            fields={
                "image_token_index": 500,
                "vision_feature_layer": -1,
                "vision_feature_select_strategy": "full",
            },
        ),
        "mistral3": demo_vlm(
            text={"model_type": "mistral", **TEXT, "head_dim": 16},
            vision=PIXTRAL,
            image={**CLIP, **LONGEST},
            fields={"image_token_index": 500, "spatial_merge_size": 2, "vision_feature_layer": -1},
        ),
        "gemma4": demo_vlm(
            text={"model_type": "gemma4_text", **GEMMA4_TEXT},
            vision=GEMMA4_VISION,
            image=GEMMA4_IMAGE,
            fields={"audio_config": None, "image_token_id": 500, "video_token_id": 501, "boi_token_id": 498},
            save=save_gemma4,
        ),
        "siglip2": demo_vlm(
            text={"model_type": "siglip2_text_model", **TEXT, "projection_size": 64},
            vision={
                "model_type": "siglip2_vision_model",
                **VISION,
                "num_patches": 64,
                "patch_size": 14,
                "vision_use_head": True,
            },
            image={
                **HALF,
                "image_processor_type": "Siglip2ImageProcessor",
                "max_num_patches": 256,
                "patch_size": 14,
                "resample": 2,
            },
            fields={},
            auto=AutoModel,
        ),
    }
)
"""By `model_type`. Pixtral's is that of LLaVA, which its checkpoints are written as."""
