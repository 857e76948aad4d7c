"""Published towers of other makers than Qwen, by the files of their checkpoints.

Fields of `vision` are those of the published config.json, from memory unless a comment says where they were read.
"""

from collections.abc import Mapping
from types import MappingProxyType

from bench import stock
from bench.random_towers import IMAGE_TOKEN, PROJECTOR, OtherTower

from vitwire_server.core.grids import Grid
from vitwire_server.core.pooling import Pooling
from vitwire_server.demo.shrinking import CLIP, HALF, IMAGENET, Json


def _square(side: int) -> Json:
    return {"size": {"height": side, "width": side}, "resample": 3}


def _cropped(side: int) -> Json:
    return {
        "size": {"shortest_edge": side},
        "crop_size": {"height": side, "width": side},
        "do_center_crop": True,
        "resample": 3,
    }


_ONE_TILE = Grid(1, 1, 1)
_LARGE = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
_SO400M = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16}
_SIGLIP = {**_SO400M, "model_type": "siglip_vision_model", "patch_size": 14, "vision_use_head": False}
_PIXTRAL = {**_LARGE, "model_type": "pixtral", "head_dim": 64}
_MISTRAL = {"model_type": "mistral", "head_dim": 16}
_PINPOINTS = {"image_grid_pinpoints": [[384 * h, 384 * w] for h in range(1, 7) for w in range(1, 7)]}
_ALONE = {"tower": ""}

_TILES: Mapping[str, OtherTower] = {
    "InternVL3-8B": OtherTower(
        model_type="internvl",
        vision={
            **_LARGE,
            "model_type": "internvl_vision",
            "attention_bias": True,
            "image_size": [448, 448],
            "patch_size": [14, 14],
        },
        width=3584,
        text={"model_type": "qwen2"},
        fields={"image_token_id": 500},
        image={**IMAGENET, **_square(448), "image_processor_type": "GotOcr2ImageProcessor", "crop_to_patches": True},
        grid=_ONE_TILE,
        plain=stock.tiles,
    ),
    "LLaVA-1.5-7B": OtherTower(
        model_type="llava",
        vision={**_LARGE, "model_type": "clip_vision_model", "image_size": 336, "patch_size": 14},
        width=4096,
        text={"model_type": "llama"},
        image={**CLIP, **_cropped(336), "image_processor_type": "CLIPImageProcessor"},
        grid=_ONE_TILE,
        plain=stock.tiles,
    ),
    "LLaVA-OneVision-7B": OtherTower(
        model_type="llava_onevision",
        # The published file has 26 layers: rows are those of the last but one of SigLIP's 27.
        vision={**_SIGLIP, "num_hidden_layers": 26, "image_size": 384},
        width=3584,
        text={"model_type": "qwen2"},
        fields={**IMAGE_TOKEN, **_PINPOINTS, "vision_aspect_ratio": "anyres_max_9"},
        image={**HALF, **_square(384), **_PINPOINTS, "image_processor_type": "LlavaOnevisionImageProcessor"},
        grid=_ONE_TILE,
        plain=stock.single_tiles,
    ),
    "Gemma-3-4B": OtherTower(
        model_type="gemma3",
        vision={**_SIGLIP, "image_size": 896},
        width=2560,
        text={"model_type": "gemma3_text"},
        fields={**IMAGE_TOKEN, "mm_tokens_per_image": 256},
        image={**HALF, **_square(896), "image_processor_type": "Gemma3ImageProcessor"},
        grid=_ONE_TILE,
        plain=stock.tiles,
    ),
    "Idefics3-8B": OtherTower(
        model_type="idefics3",
        vision={**_SO400M, "model_type": "idefics3_vision", "image_size": 364, "patch_size": 14},
        width=4096,
        text={"model_type": "llama", "pad_token_id": 0},
        fields={"image_token_id": 500, "scale_factor": 2},
        image={
            **HALF,
            "image_processor_type": "Idefics3ImageProcessor",
            "max_image_size": {"longest_edge": 364},
            "resample": 1,
            "size": {"longest_edge": 1456},
        },
        grid=_ONE_TILE,
        plain=stock.nested_tiles,
        parts={"tower": "vision_model", "projector": "connector"},
        transformers="5.23.0",  # 5.17 rounds the positions of 26 patches to bfloat16
    ),
    "Llama-3.2-11B-Vision": OtherTower(
        model_type="mllama",
        # Sizes, layouts and inner layers are the defaults of transformers' configuration, which are the published ones.
        vision={
            "model_type": "mllama_vision_model",
            "attention_heads": 16,
            "hidden_size": 1280,
            "image_size": 560,
            "intermediate_layers_indices": [3, 7, 15, 23, 30],
            "intermediate_size": 5120,
            "max_num_tiles": 4,
            "num_global_layers": 8,
            "num_hidden_layers": 32,
            "patch_size": 14,
            "vision_output_dim": 7680,
        },
        width=4096,
        text={"model_type": "mllama_text_model", "cross_attention_layers": [0], "pad_token_id": 0},
        image={
            **CLIP,
            **_square(560),
            "image_processor_type": "MllamaImageProcessor",
            "max_image_tiles": 4,
            "resample": 2,
        },
        grid=Grid(4, 2, 2),
        plain=stock.attended_tiles,
        parts={"tower": "vision_model", "projector": PROJECTOR},
        batch=4,  # 16 tiles
    ),
}

_PATCHES: Mapping[str, OtherTower] = {
    "Pixtral-12B": OtherTower(
        model_type="llava",
        vision={**_PIXTRAL, "image_size": 1024, "patch_size": 16},
        width=5120,
        text=_MISTRAL,
        fields={**IMAGE_TOKEN, "vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
        image={**CLIP, "image_processor_type": "PixtralImageProcessor", "patch_size": 16}
        | {"size": {"longest_edge": 1024}},
        grid=Grid(1, 32, 32),
        plain=stock.whole_images,
    ),
    "LFM2-VL-1.6B": OtherTower(
        model_type="lfm2_vl",
        vision={**_SO400M, "model_type": "siglip2_vision_model", "num_hidden_layers": 26}
        | {"num_patches": 256, "patch_size": 16, "vision_use_head": False},
        width=2048,
        text={"model_type": "lfm2", "layer_types": ["full_attention"], "pad_token_id": 0},
        fields={"image_token_id": 500, "downsample_factor": 2, "projector_hidden_size": 2560},
        image={**HALF, "image_processor_type": "Lfm2VlImageProcessor", "encoder_patch_size": 16, "resample": 2},
        grid=Grid(1, 32, 32),
        plain=stock.masked_patches,
    ),
    "GLM-4.1V-9B": OtherTower(
        model_type="glm4v",
        # The defaults of transformers' configuration, which are the published sizes.
        vision={
            "model_type": "glm4v_vision",
            "depth": 24,
            "hidden_size": 1536,
            "image_size": 336,
            "intermediate_size": 13696,
            "num_heads": 12,
            "out_hidden_size": 4096,
            "patch_size": 14,
        },
        width=4096,
        text={"model_type": "glm4v_text", "pad_token_id": 0},
        image={**CLIP, "image_processor_type": "Glm4vImageProcessor", "patch_size": 14, "merge_size": 2}
        | {"size": {"shortest_edge": 12544, "longest_edge": 9633792}, "temporal_patch_size": 2},
        grid=Grid(1, 32, 32),
        plain=stock.grids_thw,
        parts={"tower": "visual"},
    ),
}

_ENCODERS: Mapping[str, OtherTower] = {
    "CLIP-L/14": OtherTower(
        model_type="clip",
        vision={**_LARGE, "model_type": "clip_vision_model", "image_size": 224, "patch_size": 14},
        width=768,
        fields={"projection_dim": 768},
        image={**CLIP, **_cropped(224), "image_processor_type": "CLIPImageProcessor"},
        grid=_ONE_TILE,
        plain=stock.pooled_tiles,
        parts={"tower": "vision_model", "projection": "visual_projection"},
        pooling=Pooling.CLS,
    ),
    "SigLIP2-so400m/14-384": OtherTower(
        model_type="siglip",
        vision={**_SIGLIP, "image_size": 384, "patch_size": 14, "vision_use_head": True},
        width=1152,
        text={"projection_size": 1152},
        fields={},
        image={**HALF, **_square(384), "image_processor_type": "SiglipImageProcessor", "resample": 2},
        grid=_ONE_TILE,
        plain=stock.pooled_tiles,
        parts={"tower": "vision_model", "head": "vision_model.head"},
        pooling=Pooling.ATTENTION,
    ),
    "DINOv2-L/14": OtherTower(
        model_type="dinov2",
        # Tiles of 224: its positions are of 518, and resampled.
        vision={**_LARGE, "image_size": 518, "mlp_ratio": 4, "patch_size": 14},
        image={**IMAGENET, **_cropped(224), "image_processor_type": "BitImageProcessor"},
        grid=_ONE_TILE,
        plain=stock.pooled_tiles,
        parts=_ALONE,
        pooling=Pooling.CLS,
    ),
    "DINOv3-L/16": OtherTower(
        model_type="dinov3_vit",
        vision={**_LARGE, "image_size": 224, "num_register_tokens": 4, "patch_size": 16},
        image={**IMAGENET, **_square(224), "image_processor_type": "DINOv3ViTImageProcessorFast", "resample": 2},
        grid=_ONE_TILE,
        plain=stock.pooled_tiles,
        parts=_ALONE,
        pooling=Pooling.CLS,
    ),
}

OTHERS: Mapping[str, OtherTower] = MappingProxyType({**_TILES, **_PATCHES, **_ENCODERS})
"""By a name that readers know."""
