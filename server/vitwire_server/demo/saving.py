"""Write demo models in the checkpoint layouts that their authors publish, where transformers' own differs."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from vitwire_server.demo.demo_model import SHARD, TEXT, VISION, Json, save_plain, write_json
from vitwire_server.towers.configs import Config

_INDEX = "model.safetensors.index.json"
_KIMI_NAMES = {
    "model.mm_projector.": "mm_projector.",
    "language_model.model.blocks.": "language_model.model.layers.",
    "vision_tower.encoder.patch_embed.": "vision_tower.patch_embed.",
}
_KIMI_VL_NAMES = {
    **_KIMI_NAMES,
    "mm_projector.proj.0.": "multi_modal_projector.linear_1.",
    "mm_projector.proj.2.": "multi_modal_projector.linear_2.",
    "mm_projector.": "multi_modal_projector.",
}
_OVIS_NAMES = {
    "model.language_model.": "llm.model.",
    "lm_head.": "llm.lm_head.",
    "model.visual_embeddings_table.": "vte.",
    "model.vision_tower.transformer.": "visual_tokenizer.backbone.",
    "model.vision_tower.head_linear.": "visual_tokenizer.head.0.",
    "model.vision_tower.head_norm.": "visual_tokenizer.head.1.",
    "backbone.embeddings.position_embedding.weight": "backbone.preprocessor.pos_embed",
    "backbone.embeddings.patch_embedding.": "backbone.preprocessor.patchifier.proj.",
    "backbone.embeddings.rms_norm.": "backbone.preprocessor.patchifier.norm.",
    "backbone.rms_norm.": "backbone.trunk.post_trunk_norm.",
    "backbone.encoder.layers.": "backbone.trunk.blocks.",
    ".rms_norm1.": ".norm_1.",
    ".rms_norm2.": ".norm_2.",
    ".attention.out_proj.": ".attn.proj.",
    ".ffn.gate_proj.": ".mlp.fc1.",
    ".ffn.down_proj.": ".mlp.fc2.",
    ".ffn.up_proj.": ".mlp.fc3.",
}
_PHI4MM_NAMES = {
    "img_projection_up.": "img_projection.0.",
    "img_projection_down.": "img_projection.2.",
    "global_img_feature_extensor": "glb_GN",
    "sub_img_feature_extensor": "sub_GN",
}
_ORIGINAL_NAMES = (
    (r"^model\.language_model\.", "language_model.model."),
    (r"^lm_head\.", "language_model.lm_head."),
    (r"^model\.multi_modal_projector\.layer_norm\.", "mlp1.0."),
    (r"^model\.multi_modal_projector\.linear_1\.", "mlp1.1."),
    (r"^model\.multi_modal_projector\.linear_2\.", "mlp1.3."),
    (r"^model\.vision_tower\.", "vision_model."),
    (r"encoder\.layer\.", "encoder.layers."),
    (r"\.lambda_([12])$", r".ls\1"),
    (r"\.attention\.projection_layer\.", ".attn.proj."),
    (r"\.attention\.([qk]_norm)\.", r".attn.\1."),
    (r"\.layernorm_before\.", ".norm1."),
    (r"\.layernorm_after\.", ".norm2."),
    (r"\.cls_token$", ".class_embedding"),
    (r"\.position_embeddings$", ".position_embedding"),
    (r"\.patch_embeddings\.projection\.", ".patch_embedding."),
)


def save_internvl(
    model_type: str = "internvl_chat",
    architecture: str = "InternVLChatModel",
    **fields: Any,  # noqa: ANN401 - of config.json
) -> Callable[[PreTrainedModel, Path], None]:
    """Names, fused projections and config.json as OpenGVLab writes them, with other fields of its kin."""

    def save(model: PreTrainedModel, out: Path) -> None:
        config: Config = model.config
        weights = _fused(model.state_dict())
        ordered = sorted(weights, key=lambda name: name.startswith("language_model."))
        save_torch_state_dict({name: weights[name].contiguous() for name in ordered}, out, max_shard_size=SHARD)
        content = {
            "architectures": [architecture],
            "model_type": model_type,
            "downsample_ratio": 0.5,
            "dynamic_image_size": True,
            "force_image_size": config.vision_config.image_size[0],
            "max_dynamic_patch": 6,
            "min_dynamic_patch": 1,
            "ps_version": "v2",
            "select_layer": -1,
            "torch_dtype": "bfloat16",
            "use_thumbnail": True,
            "llm_config": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", **TEXT},
            "vision_config": _intern_vit(config.vision_config),
            **fields,
        }
        write_json(out / "config.json", content)

    return save


def save_intern_vit(model: PreTrainedModel, out: Path) -> None:
    """The tower alone, as OpenGVLab writes it."""
    weights = {name: weight.contiguous() for name, weight in _fused(model.state_dict()).items()}
    save_torch_state_dict(weights, out, max_shard_size=SHARD)
    write_json(out / "config.json", {**_intern_vit(model.config), "torch_dtype": "bfloat16"})


def _fused(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The original's names; of each attention module one projection for query, key and value."""
    weights: dict[str, Tensor] = {}
    fused: dict[str, list[Tensor]] = {}
    for name, tensor in state.items():
        for pattern, replacement in _ORIGINAL_NAMES:
            name = re.sub(pattern, replacement, name)  # noqa: PLW2901 - renamed step by step
        if found := re.search(r"\.attention\.[qkv]_proj\.", name):
            fused.setdefault(name.replace(found[0], ".attn.qkv."), []).append(tensor)
        else:
            weights[name] = tensor
    # The state dict of an attention module lists its projections in the order of its fields: q, k, v.
    return weights | {name: torch.cat(parts) for name, parts in fused.items()}


def _intern_vit(vision: Config) -> Json:
    """The tower's part of config.json."""
    return {
        "architectures": ["InternVisionModel"],
        "model_type": "intern_vit_6b",
        **VISION,
        "hidden_act": "gelu",
        "image_size": vision.image_size[0],
        "layer_norm_eps": vision.layer_norm_eps,
        "norm_type": vision.norm_type,
        "patch_size": vision.patch_size[0],
        "qk_normalization": vision.use_qk_norm,
        "qkv_bias": vision.attention_bias,
    }


_STEP3_FIELDS = {"hidden_size": "width", "num_attention_heads": "heads", "num_hidden_layers": "layers"}


def save_step3(model_type: str) -> Callable[[PreTrainedModel, Path], None]:
    """Step-3.7's weights, whose names are the hub's already, and config.json with an earlier model's field names."""

    def save(model: PreTrainedModel, out: Path) -> None:
        save_plain(model, out)
        settings = json.loads((out / "config.json").read_text(encoding="utf-8"))
        vision = {_STEP3_FIELDS.get(name, name): value for name, value in settings["vision_config"].items()}
        vision["ls_init_value"] = vision.pop("layer_scale_init_value")
        vision["model_type"] = "perception_encoder"
        write_json(out / "config.json", {**settings, "model_type": model_type, "vision_config": vision})

    return save


def save_kimi(model: PreTrainedModel, out: Path) -> None:
    """Names as Moonshot AI publishes them, which transformers reads and does not write."""
    save_plain(model, out)
    _rename(out, _KIMI_NAMES)


def save_kimi_vl(model: PreTrainedModel, out: Path) -> None:
    """transformers has no classes for Kimi-VL: those of Kimi K2.5 write its weights."""
    save_plain(model, out)
    _rename(out, _KIMI_VL_NAMES)
    written = json.loads((out / "config.json").read_text(encoding="utf-8"))
    vision = written["vision_config"]
    height, width = vision.pop("pos_emb_height"), vision.pop("pos_emb_width")
    del vision["pos_emb_time"]
    vision |= {"model_type": "moonvit", "init_pos_emb_height": height, "init_pos_emb_width": width}
    content = {
        "architectures": ["KimiVLForConditionalGeneration"],
        "model_type": "kimi_vl",
        "text_config": written["text_config"],
        "torch_dtype": "bfloat16",
        "vision_config": vision,
    }
    write_json(out / "config.json", content)


def save_ovis(model: PreTrainedModel, out: Path) -> None:
    """Names, fused projections and config.json as AIDC-AI writes them."""
    config: Config = model.config
    weights: dict[str, Tensor] = {}
    fused: dict[str, list[tuple[str, Tensor]]] = {}
    for name, tensor in model.state_dict().items():
        for old, new in _OVIS_NAMES.items():
            name = name.replace(old, new)  # noqa: PLW2901 - renamed step by step
        if found := re.search(r"\.attention\.([qkv])_proj\.", name):
            fused.setdefault(name.replace(found[0], ".attn.qkv."), []).append((found[1], tensor))
        else:
            weights[name] = tensor[None] if name.endswith("pos_embed") else tensor
    weights |= {name: torch.cat([dict(parts)[part] for part in "qkv"]) for name, parts in fused.items()}
    ordered = sorted(weights, key=lambda name: name.startswith("llm."))
    save_torch_state_dict({name: weights[name].contiguous() for name in ordered}, out, max_shard_size=SHARD)
    vision = config.vision_config
    backbone = {**VISION, "image_size": vision.image_size, "model_type": "aimv2", "patch_size": vision.patch_size}
    content = {
        "architectures": ["Ovis"],
        "model_type": "ovis",
        "hidden_size": config.hidden_size,
        "llm_config": {"model_type": "qwen2", **TEXT},
        "torch_dtype": "bfloat16",
        "visual_tokenizer_config": {
            "backbone_config": {**backbone, "qkv_bias": False, "rms_norm_eps": vision.rms_norm_eps, "use_bias": False},
            "hidden_stride": vision.hidden_stride,
            "model_type": "aimv2_visual_tokenizer",
            "tokenize_function": "softmax",
            "vocab_size": vision.vocab_size,
        },
    }
    write_json(out / "config.json", content)


def save_phi4mm(model: PreTrainedModel, out: Path) -> None:
    """Microsoft's names. Its config.json leaves out the tower's sizes, which this one is too small for."""
    save_plain(model, out)
    _rename(out, _PHI4MM_NAMES)
    written = json.loads((out / "config.json").read_text(encoding="utf-8"))
    transform = {
        "crop_size": 448,
        "embedding_cls": "tune_image",
        "hd_transform_order": "sub_glb",
        "image_token_compression_cls": "avg_pool_2d",
        "projection_cls": "mlp",
        "use_hd_transform": True,
        "with_learnable_separator": True,
    }
    content = {
        "architectures": ["Phi4MMForCausalLM"],
        "embd_layer": {"embedding_cls": "image_audio", "image_embd_layer": transform},
        "hidden_size": written["hidden_size"],
        "img_processor": None,
        "model_type": "phi4mm",
        "torch_dtype": "bfloat16",
        "vision_config": written["vision_config"],
    }
    write_json(out / "config.json", content)


_VIDEO_LLAMA_NAMES = {
    "model.vision_model.": "model.vision_encoder.",
    "model.projector.": "model.mm_projector.",
    "model.language_model.": "model.",
}


def save_videollama3(model: PreTrainedModel, out: Path) -> None:
    """Names and config.json as DAMO Academy writes them."""
    save_plain(model, out)
    _rename(out, _VIDEO_LLAMA_NAMES)
    written = json.loads((out / "config.json").read_text(encoding="utf-8"))
    vision, left_out = written["vision_config"], ("rope_parameters", "dtype", "transformers_version")
    content = {
        **written["text_config"],
        "architectures": ["Videollama3Qwen2ForCausalLM"],
        "image_token_index": 500,
        "mm_projector_type": "mlp2x_gelu",
        "model_type": "videollama3_qwen2",
        "torch_dtype": "bfloat16",
        "use_token_compression": True,
        "vision_encoder": None,
        "vision_encoder_config": {
            **{name: value for name, value in vision.items() if name not in left_out},
            "model_type": "videollama3_vision_encoder",
        },
    }
    write_json(out / "config.json", content)


def _rename(out: Path, names: Mapping[str, str]) -> None:
    """Replace, one after the other, parts of the names of all weights."""

    def name(key: str) -> str:
        for old, new in names.items():
            key = key.replace(old, new)
        return key

    for shard in out.glob("*.safetensors"):
        weights = {name(key): tensor for key, tensor in load_file(shard).items()}
        save_file(weights, shard, metadata={"format": "pt"})
    index = json.loads((out / _INDEX).read_text(encoding="utf-8"))
    write_json(out / _INDEX, {**index, "weight_map": {name(key): shard for key, shard in index["weight_map"].items()}})


def save_qwen2_5_omni(model: PreTrainedModel, out: Path) -> None:
    """With the talker's voices, a file that the published checkpoints have: there are none."""
    save_plain(model, out)
    torch.save({}, out / "spk_dict.pt")
