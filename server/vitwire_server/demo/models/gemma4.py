"""Demo models with Gemma 4's tower (Google)."""

from collections.abc import Mapping
from pathlib import Path

from transformers import AutoModel, AutoModelForMultimodalLM, PreTrainedModel

from vitwire_server.demo.demo_model import TEXT, VISION, DemoModel, demo_vlm, save_plain

_TEXT = {
    **TEXT,
    "head_dim": 16,
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 0,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "num_kv_shared_layers": 0,
    "vocab_size_per_layer_input": 512,
}
_TOWER = {
    "model_type": "gemma4_vision",
    **VISION,
    "head_dim": 16,
    "num_key_value_heads": 4,
    "patch_size": 14,
    "position_embedding_size": 128,
    "standardize": True,
}
_IMAGE = {
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
_ROUTED = {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 64}
_EMBEDDER = {
    **TEXT,
    "embedding_dim": 64,
    "global_head_dim": 16,
    "head_dim": 16,
    "hidden_size_per_layer_input": 32,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}


def _save(model: PreTrainedModel, out: Path) -> None:
    """With other numbers in the buffers that it standardises by than those that change nothing."""
    for name, buffer in model.named_buffers():
        if name.endswith("std_bias"):
            buffer.fill_(0.25)
        elif name.endswith("std_scale"):
            buffer.fill_(0.5)
    save_plain(model, out)


GEMMA4: Mapping[str, DemoModel] = {
    "gemma4": demo_vlm(
        text={"model_type": "gemma4_text", **_TEXT},
        vision=_TOWER,
        image=_IMAGE,
        fields={"audio_config": None, "image_token_id": 500, "video_token_id": 501, "boi_token_id": 498},
        save=_save,
    ),
    "diffusion_gemma": demo_vlm(
        text={**_TEXT, **_ROUTED},
        vision=_TOWER,
        image=_IMAGE,
        fields={"image_token_id": 500, "boi_token_id": 498, "canvas_length": 8},
        auto=AutoModelForMultimodalLM,
        save=_save,
    ),
    "embedding_gemma2": demo_vlm(
        text=_EMBEDDER,
        vision=_TOWER,
        image=_IMAGE,
        fields={"image_token_id": 500, "boi_token_id": 498},
        auto=AutoModel,
        save=_save,
    ),
}
"""By `model_type`."""
