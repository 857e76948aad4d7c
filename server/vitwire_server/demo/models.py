"""The demo models: of each type, only what the rule cannot derive of transformers' defaults."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import AutoModelForCausalLM, AutoModelForImageClassification, CLIPVisionModelWithProjection

from vitwire_server.demo import published, saving
from vitwire_server.demo.shrinking import CLIP, HALF, IMAGENET, MROPE, PINPOINTS, STEPS, Json
from vitwire_server.towers.models.microsoft import HD_TRANSFORM
from vitwire_server.towers.models.qwen import INTERN
from vitwire_server.towers.registry import FAMILIES


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoModel:
    """The fields of one demo model that are written down."""

    config: Json = field(default_factory=dict)
    image: Json = field(default_factory=dict)
    video: Json = field(default_factory=dict)
    """Settings of its video processor that differ from those of images."""
    processor: str = ""
    """`model_type` whose processors it has, if transformers names none for its own."""
    files: Mapping[str, Json] | None = None
    """The processors' files in whole, if transformers has no such processor."""
    base: str = ""
    """`model_type` of the model that is built, if it is not the checkpoint's own."""
    build: published.Build | None = None
    """Makes the whole model of its configuration, if it is not the first automatic class that can."""
    published: Json | None = None
    """Its config.json, if transformers has no class that writes one like it."""
    save: saving.Save = saving.save_plain
    """Writes weights and config.json in the layout that the model's authors publish."""


def _demo(
    vision: Json | None = None,
    text: Json | None = None,
    fields: Json | None = None,
    **others: Any,  # noqa: ANN401 - those of DemoModel
) -> DemoModel:
    """A demo model with these fields of the tower, of the language model, and of the whole."""
    parts = {"vision_config": vision, "text_config": text}
    config = {name: part for name, part in parts.items() if part} | (fields or {})
    return DemoModel(config=config, **others)


def _authors(name: str, settings: Json, names: saving.Names, others: DemoModel, fused: str = "") -> DemoModel:
    """A demo model of a row whose config.json and names of weights are the authors' alone; `others` has its files."""
    row, settings = FAMILIES[name], {"model_type": FAMILIES[name].model_type, **settings}
    save = saving.save_published(lambda _: settings, names, fused=fused)
    return replace(others, published=settings, build=published.of_row(row), save=save)


def _file(**settings: object) -> Mapping[str, Json]:
    return {"preprocessor_config.json": {**STEPS, **settings}}


def _square(side: int, name: str = "size") -> Json:
    return {name: {"height": side, "width": side}}


def _clip_file(side: int) -> Mapping[str, Json]:
    return _file(**IMAGENET, crop_size=side, size=side, feature_extractor_type="CLIPFeatureExtractor")


_INTERNVL_FILES, _INTERN_VIT_FILES = (_clip_file(112), _clip_file(56))
_MINICPM_FILES = _file(
    image_feature_size=16,
    image_processor_type="MiniCPMVImageProcessor",
    max_slice_nums=9,
    norm_mean=[0.5, 0.5, 0.5],
    norm_std=[0.5, 0.5, 0.5],
    patch_size=14,
    scale_resolution=448,
)
_EAGLE_FILES = _file(
    **HALF,
    image_processor_type="Eagle2_5_VLImageProcessorFast",
    max_dynamic_tiles=6,
    min_dynamic_tiles=1,
    resample=3,
    **_square(112),
    use_thumbnail=True,
)
_OVIS_FILES = _file(**CLIP, **_square(112, "crop_size"), do_center_crop=True, resample=3, size={"shortest_edge": 112})
_VIDEO_LLAMA_FILES = _file(
    **HALF,
    image_processor_type="Videollama3ImageProcessor",
    max_patches=16384,
    merge_size=1,
    patch_size=14,
    resample=3,
    size={"max_height": 512, "max_width": 512},
    temporal_patch_size=1,
)
_RESOLUTIONS = {"candidate_resolutions": [[76 * w, 76 * h] for w in (1, 2, 3) for h in (1, 2, 3)]}
_DEEPSEEK_FILES = {
    "processor_config.json": {
        **HALF,
        **_RESOLUTIONS,
        "downsample_ratio": 2,
        "normalize": True,
        "patch_size": 14,
        "processor_class": "DeepseekVLV2Processor",
    }
}
_LFM2_IMAGE: Json = {
    **HALF,
    "do_image_splitting": True,
    "downsample_factor": 2,
    "encoder_patch_size": 14,
    "max_image_tokens": 64,
    "max_tiles": 6,
    "min_image_tokens": 4,
    "min_tiles": 2,
    "resample": 2,
    "tile_size": 112,
    "use_thumbnail": True,
}
_TWO_ROPES = {"sliding_attention": MROPE, "full_attention": MROPE}
_TILED: Json = {"crop_to_patches": True, "max_patches": 6}
_LARGER = {"image_size": 112}
_SIGLIP = {"model_type": "siglip_vision_model"}
_SAM: Json = {"hidden_size": 32, "mlp_dim": 48, "num_attention_heads": 2, "image_size": 128}
_WINDOWED_SAM: Json = {**_SAM, "patch_size": 16, "window_size": 3}
_PUBLISHED_SAM: Json = {**_SAM, "patch_size": 16, "mlp_dim": 128, "image_size": 256, "output_channels": 256}
_OCR_IMAGE: Json = {**_square(128), "tile_size": 96}
_DEEPSEEK_OCR = _demo(
    {"sam_config": _PUBLISHED_SAM, "encoder_config": {"intermediate_size": 256}},
    base="unlimited_ocr",
    files={"preprocessor_config.json": {**HALF, **_square(256), "tile_size": 128}},
)
_GEMMA4 = {"standardize": True}
_WINDOWS: Json = {"num_hidden_layers": 4, "layer_types": ["window_attention", "full_attention"] * 2}
_PIXTRAL = {"image_size": 448}
_PIXTRAL_IMAGE: Json = {"size": {"longest_edge": 448}}
_MERGED_IMAGE: Json = {**_PIXTRAL_IMAGE, "patch_size": 28}
_ALL_ROWS: Json = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
_MARKED: Json = {"vision_start_token_id": 502, "vision_end_token_id": 503}
"Tokens that processors of omni models have, but no default configuration."
_SILENT: Json = {"enable_audio_output": False, "thinker_config": _MARKED}
_CROPPED: Json = {**IMAGENET, **_square(56, "crop_size"), "size": {"shortest_edge": 64}}
"Tiles of 4 x 4 patches, for towers with positions of 5 x 5."
_GEMMA4_IMAGE = {"max_soft_tokens": 70}
_MUSE_IMAGE: Json = {**HALF, "merge_size": 2, "patch_size": 14, "resample": 1, "temporal_patch_size": 2}
_MINICPM = _demo(_LARGER, image={"max_slice_nums": 4, "scale_resolution": 112})
_RADIO: Json = {"summary_idxs": [0, 2]}
_STEP = _demo(
    {"image_size": 168},
    text={"sliding_window": 512},
    image={**CLIP, **_square(168), "max_image_size": 448, "patch_size": 112, "resample": 2},
)
_OVIS = _demo(
    {**_LARGER, "hidden_stride": 2, "vocab_size": 69},
    fields={"visual_indicator_token_ids": [502, 503, 504, 505, 506]},
    image=_TILED,
)
_PHI: DemoModel = _demo(
    _LARGER,
    image={**HALF, **_square(112), "dynamic_hd": 36, "patch_size": 14},
    build=AutoModelForCausalLM.from_config,
)
_BERT = {"pixel_shuffle_factor": 2}
_INTERNVL: DemoModel = _demo(
    {"image_size": [112, 112], "attention_bias": True},
    fields={"image_seq_length": 16},
    image={**IMAGENET, **_TILED},
)
_USUAL: Json = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 3}
_VIT: Json = {**_USUAL, "num_channels": 3, "patch_size": 14}
_WIDE_HEADS: Json = {"intermediate_size": 128, "num_attention_heads": 2}
_MOONDREAM: Json = {"enc_dim": 64, "enc_ff_dim": 96, "enc_n_heads": 4, "enc_n_layers": 4, "proj_inner_dim": 96}
_MOONDREAM |= {"crop_size": 56, "max_crops": 6, "overlap_margin": 1}
_INTERN: Json = {
    **_VIT,
    "image_size": 112,
    "layer_norm_eps": 1e-6,
    "norm_type": "rms_norm",
    "qk_normalization": True,
    "qkv_bias": False,
}
_CHAT: Json = {
    "downsample_ratio": 0.5,
    "dynamic_image_size": True,
    "force_image_size": 112,
    "llm_config": {"hidden_size": 64, "intermediate_size": 96},
    "max_dynamic_patch": 6,
    "min_dynamic_patch": 1,
    "select_layer": -1,
    "use_thumbnail": True,
    "vision_config": _INTERN,
}
_MINICPMV: Json = {
    "drop_vision_last_layer": False,
    "hidden_size": 256,
    "query_num": 16,
    "version": 2.6,
    "vision_config": {**_VIT, "image_size": 224, "model_type": "siglip"},
}


def _chat(name: str, **fields: object) -> DemoModel:
    """A demo model of InternVL's kin."""
    return _authors(name, {**_CHAT, **fields}, saving.INTERN_NAMES, _demo(files=_INTERNVL_FILES), fused=saving.FUSED)


def _nemotron(name: str, columns: int, **image: object) -> DemoModel:
    """InternVL's fields around the smallest C-RADIO that NVIDIA's code names; `columns` of its projector's MLP."""
    teachers = [{"name": "clip"}, {"name": "sam", "use_summary": False}, {"name": "dino"}]
    args = {"model": "vit_tiny_patch14_224", "cpe_max_size": 112, "register_multiple": 10, "teachers": teachers}
    tower: Json = {"args": {**args, "cls_token_per_teacher": True}}
    settings = {**_CHAT, "force_image_size": 56, "projector_hidden_size": columns, "ps_version": "v2"}
    others = _demo(image=image, processor="llava")
    return _authors(name, {**settings, "vision_config": tower}, saving.RADIO_NAMES, others, fused=saving.FUSED)


_WRITTEN: Mapping[str, DemoModel] = {
    **{
        name: _authors(
            name,
            {"hidden_size": 48, "vision_config": {**_VIT, "image_size": 56, "spatial_merge_size": 2}},
            ((r"^tower\.", "visual."), (r"^projector\.", "mlp_AR.")),
            _demo(processor="paddleocr_vl"),
        )
        for name in ("Keye", "KeyeVL1_5")
    },
    "Llama_Nemotron_Nano_VL": _nemotron("Llama_Nemotron_Nano_VL", 64, do_normalize=False),
    "NVLM_D": _chat("NVLM_D"),
    "NemotronH_Nano_VL_V2": _nemotron("NemotronH_Nano_VL_V2", 96),
    "alpamayo2_super": _demo(base="qwen3_vl", save=saving.save_alpamayo),
    "aria": _demo(
        {"image_size": 490, "patch_size": 49},
        fields={"projector_patch_to_query_dict": {"25": 4, "100": 8}},
        image={"do_resize": False, "max_image_size": 490, "min_image_size": 168},
    ),
    "aya_vision": _demo(image={**HALF, "crop_to_patches": True}),
    "bailing_moe_v3_vl": _authors(
        "bailing_moe_v3_vl",
        {
            "text_config": {"hidden_size": 64},
            "vision_config": {
                "depth": 4,
                "hidden_size": 64,
                "intermediate_size": 96,
                "model_type": "qwen3_moe_vit",
                "num_heads": 4,
                "num_position_embeddings": 256,
                "out_hidden_size": 48,
            },
        },
        saving.BAILING_NAMES,
        _demo(processor="qwen3_5"),
    ),
    "clip_vision_model": _demo(build=CLIPVisionModelWithProjection._from_config),  # noqa: SLF001 - as automatic classes
    "cohere2_vision": _demo(image={**HALF, **_square(56), "max_patches": 6}),
    "cohere_compass": _demo(text={"rope_parameters": _TWO_ROPES}),
    "colpali": _demo(fields={"vlm_config": {"model_type": "paligemma", "projection_dim": 64}}),
    "colmodernvbert": _demo(fields={"vlm_config": _BERT}, processor="idefics3"),
    "cosmos3_edge": _demo({"num_hidden_layers": 4, "patch_size": 16}),
    "deepseek_ocr2": _demo(
        {"sam_config": {**_SAM, "patch_size": 2, "global_attn_indexes": []}},
        {"mlp_layer_types": ["dense", "sparse", "sparse"], "num_experts_per_tok": 2},
        image=_OCR_IMAGE,
    ),
    "deepseek_vl_hybrid": _demo(
        fields={"high_res_vision_config": _WINDOWED_SAM},
        image={**_square(128, "high_res_size"), **{f"high_res_{name}": value for name, value in IMAGENET.items()}},
    ),
    "deepseek_vl_v2": _authors(
        "deepseek_vl_v2",
        {
            **_RESOLUTIONS,
            "projector_config": {"downsample_ratio": 2, "input_dim": 64, "model_type": "mlp_projector", "n_embed": 64},
            "vision_config": {
                "heads": 4,
                "image_size": 76,
                "layers": 3,
                "patch_size": 14,
                "width": 64,
                "model_name": "siglip_so400m_patch14_384",
                "model_type": "vision",
            },
        },
        saving.TIMM_NAMES,
        _demo(files=_DEEPSEEK_FILES),
        fused=saving.FUSED,
    ),
    "deepseek_vl_v2-deeplip_b_l": replace(_DEEPSEEK_OCR, save=saving.save_deepseek_ocr),
    "deit": _demo(image=IMAGENET),
    "diffusion_gemma": _demo(
        _GEMMA4,
        {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 64},
        image=_GEMMA4_IMAGE,
        processor="gemma4",
        save=saving.save_gemma4,
    ),
    "dinov2": _demo(fields={"image_size": 70, "use_swiglu_ffn": True}, image=_CROPPED),
    "dinov2_with_registers": _demo(fields={"image_size": 70, "num_register_tokens": 3}, image=_CROPPED),
    "dinov3_vit": _demo(
        fields={"image_size": 70, "num_register_tokens": 4, "use_gated_mlp": True},
        image={**IMAGENET, **_square(56), "resample": 2},
    ),
    "dots_ocr": _authors(
        "dots_ocr",
        {
            "architectures": ["DotsOCRForCausalLM"],
            "hidden_size": 48,
            "vision_config": {**_VIT, "embed_dim": 64, "hidden_size": 48, "spatial_merge_size": 2},
        },
        saving.DOTS_NAMES,
        _demo(processor="qwen2_vl"),
    ),
    "eagle_2_5_vl": _authors(
        "eagle_2_5_vl",
        {
            "downsample_ratio": 0.5,
            "select_layer": -1,
            "text_config": {"hidden_size": 64, "model_type": "qwen2"},
            "vision_config": {**_VIT, **_LARGER, **_SIGLIP},
        },
        saving.EAGLE_NAMES,
        _demo(files=_EAGLE_FILES),
    ),
    "embedding_gemma2": _demo(_GEMMA4, image=_GEMMA4_IMAGE, save=saving.save_gemma4),
    "ernie4_5_vl_moe": _demo(text={"rope_parameters": {**MROPE, "mrope_section": [3, 3, 2]}}),
    "florence2": _demo(
        {
            "depths": [1, 1, 2, 1],
            "mlp_ratio": 4.0,
            "embed_dim": [16, 32, 32, 64],
            "max_position_embeddings": 8,
            "num_groups": [2, 4, 4, 8],
            "num_heads": [2, 4, 4, 8],
            "projection_dim": 64,
            "window_size": 5,
        },
        image={**IMAGENET, "do_center_crop": False, **_square(96)},
    ),
    "gemma3": _demo(_LARGER),
    "gemma4": _demo(_GEMMA4, {"hidden_size_per_layer_input": 0}, image=_GEMMA4_IMAGE, save=saving.save_gemma4),
    "glm4v_moe": _demo(text={"rope_parameters": {"mrope_section": [2, 1, 1]}}),
    "glm_ocr": _demo(processor="glm46v"),
    "got_ocr2": _demo(_WINDOWED_SAM),
    "granite_docling": _demo(_LARGER, fields={"density_router_hidden_size": 16}, image={"max_patches": 20}),
    "h2ovl_chat": _chat("h2ovl_chat", use_msac=True),
    "hunyuan_vl": _demo(
        text={"head_dim": 16, "rope_parameters": {"mrope_section": [2, 2, 2, 2]}},
        image={"resample": 1, "size": {"shortest_edge": 56**2, "longest_edge": 448**2}},
    ),
    "hy_v4_vl": _authors(
        "hy_v4_vl",
        {"vision_config": {**_VIT, "max_image_size": 112, "out_hidden_size": 48}},
        saving.HY4_NAMES,
        _demo(image={"resample": 1, "size": {"shortest_edge": 56**2, "longest_edge": 448**2}}, processor="hunyuan_vl"),
    ),
    "idefics2": _demo(_LARGER, image={"size": {"longest_edge": 224, "shortest_edge": 56}}),
    "intern_vit_6b": _authors(
        "intern_vit_6b",
        {**_INTERN, "image_size": 56, "norm_type": "layer_norm", "qkv_bias": True},
        ((r"^tower\.", ""), *saving.INTERN_NAMES),
        _demo(files=_INTERN_VIT_FILES),
        fused=saving.FUSED,
    ),
    **dict.fromkeys(("internvl", "qianfan_ocr"), _INTERNVL),
    "internvl_chat": _chat("internvl_chat"),
    **{name: _demo(base="qwen3_5_moe", save=saving.save_typed(name, name)) for name in INTERN},
    "interns1": replace(_INTERNVL, base="internvl", save=saving.save_typed("interns1", "interns1_vision")),
    "janus": _demo(
        {"image_size": 128, "patch_size": 16, "projection_dim": 64},
        fields={"vq_config": {"channel_multiplier": [1, 1]}},
        image=HALF,
    ),
    "kimi_k25": _demo(image=HALF, save=saving.save_kimi),
    "kimi_k3": _authors(
        "kimi_k3",
        {
            "text_config": {"hidden_size": 64},
            "vision_config": {
                **{f"vt_{name}": value for name, value in _USUAL.items()},
                "init_pos_emb_height": 8,
                "init_pos_emb_width": 8,
                "merge_kernel_size": [2, 2],
                "patch_size": 14,
                "qkv_hidden_size": 96,
            },
        },
        saving.KIMI_K3_NAMES,
        _demo(image=HALF, processor="kimi_k25"),
        fused=".wqkv.",
    ),
    "kimi_vl": _demo({"pos_emb_time": 1}, base="kimi_k25", image=HALF, save=saving.save_kimi_vl),
    "lfm2_vl": _demo(image=_LFM2_IMAGE),
    "lfm3_vl": _demo({"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2}, image=HALF),
    **dict.fromkeys(("lighton_ocr", "mistral_large4"), _demo(_PIXTRAL, image=_MERGED_IMAGE)),
    "llama4": _demo(
        {**_LARGER, "intermediate_size": 256}, image={**HALF, **_square(112), "max_patches": 6, "resample": 2}
    ),
    "llava-pixtral": _demo(
        {**_PIXTRAL, "model_type": "pixtral"},
        {"model_type": "mistral"},
        fields=_ALL_ROWS,
        base="llava",
        image=_PIXTRAL_IMAGE,
        processor="mistral3",
    ),
    "llava-siglip": _demo(_SIGLIP, fields=_ALL_ROWS, base="llava", processor="siglip"),
    "llava_onevision2": _authors(
        "llava_onevision2",
        {
            "text_config": {"hidden_size": 64},
            "vision_config": {**_VIT, **_WIDE_HEADS, "spatial_merge_size": 2},
        },
        saving.ONEVISION_NAMES,
        _demo(image=CLIP, processor="qwen2_vl"),
    ),
    "llava_next-siglip": _demo(
        _SIGLIP,
        fields={"vision_feature_layer": [-3, -2, 0, -1], "vision_feature_select_strategy": "full"},
        base="llava_next",
        image={**HALF, **_square(56), **_square(56, "crop_size"), "do_center_crop": False},
    ),
    "llava_next_video": _demo(
        fields={"image_grid_pinpoints": PINPOINTS[1:]}, image={"image_grid_pinpoints": PINPOINTS[1:]}
    ),
    "minicpm_ocr": replace(_MINICPM, image={**_MINICPM.image, **HALF, "patch_size": 14}),
    **{
        name: _authors(name, _MINICPMV, ((r"^tower\.", "vpm."),), _demo(files=_MINICPM_FILES))
        for name in ("minicpmo", "minicpmv")
    },
    **dict.fromkeys(("minicpmv4_6", "minicpmv4_7"), _MINICPM),
    "minimax_m3_vl": _demo(image=CLIP),
    "mistral3": _demo(_PIXTRAL, image=_PIXTRAL_IMAGE),
    "mllama": _demo({"vision_output_dim": 192}, {"cross_attention_layers": [1]}),
    "mlcd": _demo(base="mlcd_vision_model", save=saving.save_typed("mlcd")),
    "moondream3": _authors(
        "moondream3",
        {"architectures": ["HfMoondream"], "config": {"text": {"dim": 96}, "vision": _MOONDREAM}},
        saving.MOONDREAM_NAMES,
        _demo(files={}),
        fused=saving.FUSED,
    ),
    **dict.fromkeys(("modernvbert", "ultravbert"), _demo(fields=_BERT, processor="idefics3")),
    "muse_glimmer": _demo(_WINDOWS, fields={"out_hidden_size": 256}, image=_MUSE_IMAGE),
    "muse_spark": _demo(
        _WINDOWS,
        fields={
            "out_hidden_size": 256,
            "audio_config": {"depths": [1], "hidden_sizes": [16], "num_hidden_layers": 1, "patch_sizes": [16]},
        },
        image=_MUSE_IMAGE,
    ),
    "nemotron_h_omni": _demo({**_RADIO, "video_temporal_patch_size": 2}, image={**CLIP, "patch_size": 14}),
    "opencua": _demo(base="qwen2_5_vl", save=saving.save_opencua),
    "ovis": replace(_OVIS, base="ovis2", files=_OVIS_FILES, save=saving.save_ovis),
    "ovis2": _OVIS,
    **{
        name: _authors(
            name,
            {
                "hidden_size": 48,
                "visual_vocab_size": 68,
                "vit_config": {**_VIT, "hidden_stride": 2, "image_size": 56},
            },
            saving.OVIS2_5_NAMES,
            _demo(processor="siglip"),
        )
        for name in ("ovis2_5", "ovis2_6", "ovis2_6_moe", "ovis2_6_next")
    },
    "paligemma": _demo(fields={"projection_dim": 64}),
    "paddleocr_vl": _demo(text={"rope_parameters": MROPE}),
    "phi3_v": _authors(
        "phi3_v",
        {
            "embd_layer": {**HD_TRANSFORM, "embedding_cls": "image"},
            "hidden_size": 48,
            "img_processor": {"image_dim_out": 64, "name": "clip_vision_model", "num_img_tokens": 4},
            "vision_config": {**_VIT, "image_size": 56},
        },
        saving.PHI3_NAMES,
        _demo(files=_file(**CLIP, image_processor_type="Phi3VImageProcessor", num_crops=4)),
    ),
    "phi4-siglip": _authors(
        "phi4-siglip",
        {
            "hidden_size": 48,
            "max_num_patches": 64,
            "min_num_patches": 4,
            "mm_hidden_size": 64,
            "mm_projector_type": "mlp2x_gelu",
            "mm_vision_tower": "google/siglip2-so400m-patch16-naflex",
            "vision_config": {**_USUAL, "model_type": "siglip2_vision_model", "num_patches": 64},
        },
        saving.PHI4_SIGLIP_NAMES,
        _demo(files={"processor_config.json": {"processor_class": "Phi4VisionRProcessor"}}),
    ),
    "phi4_multimodal": _PHI,
    "phi4mm": replace(_PHI, base="phi4_multimodal", save=saving.save_phi4mm),
    "pix2struct": replace(
        _demo({"patch_embed_hidden_size": 588, "seq_len": 64}, image={"max_patches": 64, **_square(14, "patch_size")}),
        save=saving.save_pix2struct,
    ),
    "qwen2_5_omni": _demo(fields=_SILENT, save=saving.save_qwen2_5_omni),
    **dict.fromkeys(("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"), _demo(fields=_MARKED)),
    "qwen3_omni_moe": _demo(fields=_SILENT),
    "qwen4_exp": _demo(
        text={
            "indexer_budget": 64,
            "indexer_compress_ratio": 4,
            "indexer_head_dim": 16,
            "indexer_kv_heads": 1,
            "indexer_n_heads": 2,
            "head_dim": 16,
        }
    ),
    "radio": _demo(
        fields=_RADIO, image={"crop_size": {"height": 56, "width": 42}, "do_normalize": False}, processor="clip"
    ),
    "shieldgemma2": _demo(_LARGER, build=AutoModelForImageClassification.from_config),
    **dict.fromkeys(("siglip", "siglip2"), _demo({"vision_use_head": True})),
    "siglip_vision_model": _demo(fields={"vision_use_head": True}),
    "skywork_chat": _chat("skywork_chat"),
    "smolvlm": _demo(
        {"image_size": 60}, image={"video_sampling": {"fps": 1, "max_frames": 64, "video_size": {"longest_edge": 60}}}
    ),
    "step3p7": _STEP,
    **{
        name: replace(_STEP, base="step3p7", save=saving.save_step3(name))
        for name in ("step3_vl", "step5_vl", "step_robotics")
    },
    "t5gemma2": _demo(fields={"encoder": {"vision_config": _LARGER}}),
    "t5gemma2_encoder": _demo(_LARGER, {"dropout_rate": 0.0}),
    "tipsv2": _demo(
        {"image_size": 70, "num_register_tokens": 2, "use_swiglu_ffn": True},
        image={**_square(56), "do_normalize": False, "resample": 2},
    ),
    "unlimited-ocr": replace(_DEEPSEEK_OCR, save=saving.save_unlimited_ocr),
    "unlimited_ocr": _demo(
        {"sam_config": {**_SAM, "patch_size": 4}, "encoder_config": {"image_size": 32, "patch_size": 4}},
        image={**HALF, **_TILED, **_OCR_IMAGE, "min_patches": 2, "background_color": [127, 127, 127]},
    ),
    "video_llama_3": _demo({"patch_size": 14}, video={"merge_size": 2}),
    "videollama3_qwen2": _demo(
        {"patch_size": 14}, base="video_llama_3", files=_VIDEO_LLAMA_FILES, save=saving.save_videollama3
    ),
    "vipllava": _demo(fields={"vision_feature_layer": [-2, -3, 1]}),
    "vlm": _demo(base="hyperclovax_vision_v2", save=saving.save_typed("vlm", "qwen2_5_vl")),
}
DEMO_MODELS: Mapping[str, DemoModel] = {name: _WRITTEN.get(name, DemoModel()) for name in FAMILIES}
"By `model_type`, or by the name of a row of the table of models."
