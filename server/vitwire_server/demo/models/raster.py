"""Demo models of packed patches without `grid_thw`, other than those of Gemma's and Pixtral's towers."""

from collections.abc import Mapping
from pathlib import Path

from transformers import AutoModel, AutoModelForMultimodalLM, PreTrainedModel

from vitwire_server.demo.demo_model import CLIP, HALF, TEXT, VISION, DemoModel, demo_vlm, save_plain
from vitwire_server.demo.models.packed_parts import HYBRID, QWEN3_TEXT

_MUSE_TEXT = {**TEXT, "head_dim": 16, "intermediate_size": 512, "sliding_window": 64}
_MUSE_EXPERTS = {
    "moe_hidden_size": 32,
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 2,
    "num_local_experts": 4,
}
_MUSE_VISION = {
    **VISION,
    "num_hidden_layers": 4,
    "layer_types": ["window_attention", "full_attention", "window_attention", "full_attention"],
    "pos_emb_height": 8,
    "pos_emb_width": 8,
}
_MUSE_SIZES = {**HALF, "merge_size": 2, "patch_size": 14, "resample": 1, "temporal_patch_size": 2}
_MUSE_IMAGE = {**_MUSE_SIZES, "image_processor_type": "MuseGlimmerImageProcessor"}
_MUSE_VIDEO = {**_MUSE_SIZES, "video_processor_type": "MuseGlimmerVideoProcessor"}
_MUSE = {"image_token_id": 500, "video_token_id": 501, "out_hidden_size": 256, "projector_hidden_size": 96}
_MUSE_AUDIO = {
    "depths": [1],
    "hidden_sizes": [16],
    "num_hidden_layers": 1,
    "out_hidden_size": 64,
    "patch_sizes": [16],
}

_CPM_TEXT = {"model_type": "qwen3_5_text", **QWEN3_TEXT, **HYBRID, "intermediate_size": 512}
_CPM_SIZES = {**HALF, "max_slice_nums": 4, "patch_size": 14, "resample": 3, "scale_resolution": 112}

_NEMOTRON_TEXT = {
    "model_type": "nemotron_h",
    **TEXT,
    "chunk_size": 16,
    "head_dim": 16,
    "layers_block_type": ["linear_attention", "mlp", "full_attention"],
    "mamba_head_dim": 16,
    "mamba_num_heads": 4,
    "n_groups": 1,
    "ssm_state_size": 16,
}
_RADIO = {
    "model_type": "radio",
    "hidden_size": 64,
    "max_img_size": 112,
    "mlp_ratio": 1.5,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "patch_size": 14,
    "video_temporal_patch_size": 2,
}


def _minicpm(processor: str) -> DemoModel:
    return demo_vlm(
        text=_CPM_TEXT,
        vision={**VISION, "image_size": 112, "patch_size": 14},
        image={**_CPM_SIZES, "image_processor_type": f"{processor}ImageProcessor"},
        video={**_CPM_SIZES, "video_processor_type": f"{processor}VideoProcessor"},
        fields={"image_token_id": 500, "video_token_id": 501, "insert_layer_id": 1},
    )


def _save_pix2struct(model: PreTrainedModel, out: Path) -> None:
    """With small queries, as trained ones are: attention does not scale their products with keys."""
    for name, weight in model.named_parameters():
        if name.endswith("attention.query.weight"):
            weight.data.mul_(0.25)
    save_plain(model, out)


RASTER: Mapping[str, DemoModel] = {
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
    "hunyuan_vl": demo_vlm(
        text={
            **TEXT,
            "head_dim": 16,
            "pad_token_id": 0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 2, 2]},
        },
        vision={**VISION, "max_image_size": 112, "patch_size": 14, "text_hidden_size": 64},
        image={
            **CLIP,
            "image_processor_type": "HunYuanVLImageProcessor",
            "merge_size": 2,
            "patch_size": 14,
            "resample": 1,
            "size": {"shortest_edge": 56 * 56, "longest_edge": 448 * 448},
        },
    ),
    "muse_glimmer": demo_vlm(text=_MUSE_TEXT, vision=_MUSE_VISION, image=_MUSE_IMAGE, video=_MUSE_VIDEO, fields=_MUSE),
    "muse_spark": demo_vlm(
        text={**_MUSE_TEXT, **_MUSE_EXPERTS},
        vision=_MUSE_VISION,
        image=_MUSE_IMAGE,
        video=_MUSE_VIDEO,
        fields={**_MUSE, "audio_token_id": 502, "audio_config": _MUSE_AUDIO},
    ),
    "minicpmv4_6": _minicpm("MiniCPMV4_6"),
    "minicpmv4_7": _minicpm("MiniCPMV4_6"),
    "minicpm_ocr": _minicpm("MiniCPMOcr"),
    "nemotron_h_omni": demo_vlm(
        text=_NEMOTRON_TEXT,
        vision=_RADIO,
        image={**CLIP, "image_processor_type": "NemotronH_Omni_Reasoning_V3ImageProcessor", "patch_size": 14},
        fields={"image_token_id": 500, "vision_hidden_size": 64, "projector_hidden_size": 96},
        auto=AutoModelForMultimodalLM,
    ),
}
"""By `model_type`."""
