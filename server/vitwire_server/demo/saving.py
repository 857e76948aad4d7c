"""Write models in the checkpoint layouts that their authors publish, if transformers' differs."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from vitwire_server.demo.shrinking import Json
from vitwire_server.towers.models.hunyuan import NAMES
from vitwire_server.towers.models.microsoft import TRANSFORM

FUSED = ".attn.qkv."
SHARD = "180KB"
"""Largest shard, so that tiny checkpoints have several too."""
Save = Callable[[PreTrainedModel, Path], None]
Names = Sequence[tuple[str, str]]
"""Regular expressions and what they become, one after the other."""
_QKV = re.compile(r"\.(?:attention|attn)\.([qkv])_proj\.")


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Sorted, so that the same content gives the same bytes."""
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def save_plain(model: PreTrainedModel, out: Path) -> None:
    """As transformers writes it."""
    model.save_pretrained(out, max_shard_size=SHARD)


def save_published(settings: Callable[[Json], Json], names: Names = (), *, fused: str = "") -> Save:
    """Another config.json, made of the whole configuration, and other names.

    `fused` names the one projection for query, key and value that each attention module of the tower has.
    """

    def save(model: PreTrainedModel, out: Path) -> None:
        weights = _renamed(_weights(model, out), names)
        ordered = sorted(weights, key=lambda name: name.startswith(("llm.", "language")))
        weights = {name: weights[name].contiguous() for name in ordered}
        save_torch_state_dict(_fused(weights, fused) if fused else weights, out, max_shard_size=SHARD)
        whole = json.loads(json.dumps(model.config.to_dict(), default=str))
        write_json(out / "config.json", {"torch_dtype": "bfloat16", **settings(whole)})

    return save


def _weights(model: PreTrainedModel, out: Path) -> dict[str, Tensor]:
    """By the names that transformers writes, if it has a class for the model."""
    if not isinstance(model, PreTrainedModel):
        return model.state_dict()
    save_plain(model, out)
    weights: dict[str, Tensor] = {}
    for shard in sorted(out.glob("*.safetensors")):
        weights |= load_file(shard)
        shard.unlink()
    (out / "model.safetensors.index.json").unlink(missing_ok=True)
    return weights


def _renamed(weights: Mapping[str, Tensor], names: Names) -> dict[str, Tensor]:
    renamed = {}
    for name, tensor in weights.items():
        for pattern, replacement in names:
            name = re.sub(pattern, replacement, name)  # noqa: PLW2901 - renamed step by step
        flat = tensor.flatten(1) if name.endswith(".patch_emb.weight") else tensor
        flat = torch.cat([flat, flat.flip(-1)]) if name.endswith(".wte") else flat  # another token
        renamed[name] = flat[None] if name.endswith(("pos_embed", ".pos_emb")) and flat.ndim == 2 else flat
    return renamed


def _fused(weights: Mapping[str, Tensor], fused: str) -> dict[str, Tensor]:
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in weights.items():
        if found := _QKV.search(name):
            parts.setdefault(name.replace(found[0], fused), {})[found[1]] = tensor
    whole = {name: torch.cat([own[part] for part in "qkv"]) for name, own in parts.items()}
    return {name: tensor for name, tensor in weights.items() if not _QKV.search(name)} | whole


def save_qwen2_5_omni(model: PreTrainedModel, out: Path) -> None:
    """With the talker's voices, a file that the published checkpoints have: there are none."""
    save_plain(model, out)
    torch.save({}, out / "spk_dict.pt")


def save_gemma4(model: PreTrainedModel, out: Path) -> None:
    """With other numbers in the buffers that it standardises by than those that change nothing."""
    for name, buffer in model.named_buffers():
        if name.endswith(("std_bias", "std_scale")):
            buffer.fill_(0.25 if name.endswith("bias") else 0.5)
    save_plain(model, out)


def save_pix2struct(model: PreTrainedModel, out: Path) -> None:
    """With small queries, as trained ones are: attention does not scale their products with keys."""
    for name, weight in model.named_parameters():
        if name.endswith("attention.query.weight"):
            weight.data.mul_(0.25)
    save_plain(model, out)


def taken(fields: Mapping[str, Any], names: str) -> Json:
    """Fields of these names, which may say after a colon what to call them."""
    pairs = (name.partition(":") for name in names.split())
    return {new or old: fields[old] for old, _, new in pairs}


def save_typed(model_type: str, vision_type: str = "", names: Names = ()) -> Save:
    """Under other types than transformers' classes have, and with other names."""

    def settings(whole: Json) -> Json:
        vision = {"vision_config": {**whole["vision_config"], "model_type": vision_type}} if vision_type else {}
        return {**whole, "model_type": model_type, **vision}

    return save_published(settings, names)


save_opencua = save_typed("opencua", "qwen2_5_vl", ((r"^visual\.", "vision_tower."),))
save_alpamayo = save_published(lambda whole: {"model_type": "alpamayo2_super", "vlm_config": whole}, ((r"^", "vlm."),))


_MLP = "hidden_size intermediate_size num_hidden_layers num_attention_heads"
_MLP1 = (
    (r"^projector\.layer_norm\.", "mlp1.0."),
    (r"^projector\.linear_1\.", "mlp1.1."),
    (r"^projector\.linear_2\.", "mlp1.3."),
)
EAGLE_NAMES = ((r"^tower\.", "vision_model.vision_model."), *_MLP1)
INTERN_NAMES = (
    *_MLP1,
    (r"^tower\.", "vision_model."),
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
RADIO_NAMES = (
    *_MLP1,
    (r"^tower\.", "vision_model.radio_model."),
    (r"\.embeddings\.patch_projection\.", ".model.patch_generator.embedder."),
    (r"\.embeddings\.position_embedding$", ".model.patch_generator.pos_embed"),
    (r"\.embeddings\.cls_register_token$", ".model.patch_generator.cls_token.token"),
    (r"\.encoder\.layer\.", ".model.blocks."),
    (r"\.attention\.o_proj\.", ".attn.proj."),
)
BAILING_NAMES = (
    (r"^tower\.merger\.linear_fc1\.", "model.linear_proj.0."),
    (r"^tower\.merger\.linear_fc2\.", "model.linear_proj.2."),
    (r"^tower\.", "model.visual."),
)


def save_step3(model_type: str) -> Save:
    """Step-3.7's weights, whose names are the hub's already, and an earlier model's names of the tower's fields."""
    names = {"hidden_size": "width", "num_attention_heads": "heads", "num_hidden_layers": "layers"}
    names["layer_scale_init_value"] = "ls_init_value"

    def settings(whole: Json) -> Json:
        vision = {names.get(name, name): value for name, value in whole["vision_config"].items()}
        return {**whole, "model_type": model_type, "vision_config": {**vision, "model_type": "perception_encoder"}}

    return save_published(settings)


def _deepseek_ocr(whole: Json) -> Json:
    sam, clip = (whole["vision_config"][f"{part}_config"] for part in ("sam", "encoder"))
    same = "hidden_size:width num_attention_heads:heads num_hidden_layers:layers"
    clip = taken(clip, f"{same} image_size patch_size")
    layers = {"clip-l-14-224": clip, "sam_vit_b": taken(sam, f"{same} downsample_channels global_attn_indexes")}
    return {
        "language_config": whole["text_config"],
        "model_type": "deepseek_vl_v2",
        "projector_config": {"n_embed": whole["text_config"]["hidden_size"], "projector_type": "linear"},
        "vision_config": {"image_size": sam["image_size"], "model_name": "deeplip_b_l", "width": layers},
    }


save_deepseek_ocr = save_published(_deepseek_ocr)
save_unlimited_ocr = save_published(lambda whole: {**_deepseek_ocr(whole), "model_type": "unlimited-ocr"})


_KIMI_NAMES = (
    (r"^model\.mm_projector\.", "mm_projector."),
    (r"^language_model\.model\.blocks\.", "language_model.model.layers."),
    (r"^vision_tower\.encoder\.patch_embed\.", "vision_tower.patch_embed."),
)
_KIMI_VL_NAMES = (
    *_KIMI_NAMES,
    (r"^mm_projector\.proj\.0\.", "multi_modal_projector.linear_1."),
    (r"^mm_projector\.proj\.2\.", "multi_modal_projector.linear_2."),
    (r"^mm_projector\.", "multi_modal_projector."),
)
KIMI_K3_NAMES = (
    (r"^tower\.(patch_embed\.pos_emb)\.position_embeddings", r"vision_tower.\1.weight"),
    (r"^tower\.patch_embed\.", "vision_tower.patch_embed."),
    (r"^tower\.layers\.", "vision_tower.encoder.blocks."),
    (r"^tower\.", "vision_tower.encoder."),
    (r"\.norm1\.", ".norm0."),
    (r"\.norm2\.", ".norm1."),
    (r"\.fc1\.", ".fc0."),
    (r"\.fc2\.", ".fc1."),
    (r"\.attn\.proj\.", ".wo."),
    (r"^projector\.1\.", "mm_projector.proj.0."),
    (r"^projector\.3\.", "mm_projector.proj.2."),
    (r"^projector\.4\.", "mm_projector.post_norm."),
)


def _kimi_vl(whole: Json) -> Json:
    same = "pos_emb_height:init_pos_emb_height pos_emb_width:init_pos_emb_width patch_size merge_kernel_size"
    return {
        "architectures": ["KimiVLForConditionalGeneration"],
        "model_type": "kimi_vl",
        "text_config": whole["text_config"],
        "vision_config": {"model_type": "moonvit", **taken(whole["vision_config"], f"{_MLP} {same}")},
    }


save_kimi = save_published(lambda whole: whole, _KIMI_NAMES)
save_kimi_vl = save_published(_kimi_vl, _KIMI_VL_NAMES)


def _ovis(whole: Json) -> Json:
    vision = whole["vision_config"]
    backbone = taken(vision, f"{_MLP} image_size patch_size rms_norm_eps")
    return {
        "architectures": ["Ovis"],
        "model_type": "ovis",
        "hidden_size": whole["hidden_size"],
        "llm_config": whole["text_config"],
        "visual_tokenizer_config": {
            "backbone_config": {**backbone, "model_type": "aimv2", "qkv_bias": False, "use_bias": False},
            "model_type": "aimv2_visual_tokenizer",
            "tokenize_function": "softmax",
            **taken(vision, "hidden_stride vocab_size"),
        },
    }


_OVIS_NAMES = (
    (r"^model\.language_model\.", "llm.model."),
    (r"^lm_head\.", "llm.lm_head."),
    (r"^model\.visual_embeddings_table\.", "vte."),
    (r"^model\.vision_tower\.transformer\.", "visual_tokenizer.backbone."),
    (r"^model\.vision_tower\.head_linear\.", "visual_tokenizer.head.0."),
    (r"^model\.vision_tower\.head_norm\.", "visual_tokenizer.head.1."),
    (r"backbone\.embeddings\.position_embedding\.weight", "backbone.preprocessor.pos_embed"),
    (r"backbone\.embeddings\.patch_embedding\.", "backbone.preprocessor.patchifier.proj."),
    (r"backbone\.embeddings\.rms_norm\.", "backbone.preprocessor.patchifier.norm."),
    (r"backbone\.rms_norm\.", "backbone.trunk.post_trunk_norm."),
    (r"backbone\.encoder\.layers\.", "backbone.trunk.blocks."),
    (r"\.rms_norm([12])\.", r".norm_\1."),
    (r"\.attention\.out_proj\.", ".attn.proj."),
    (r"\.ffn\.gate_proj\.", ".mlp.fc1."),
    (r"\.ffn\.down_proj\.", ".mlp.fc2."),
    (r"\.ffn\.up_proj\.", ".mlp.fc3."),
)
save_ovis = save_published(_ovis, _OVIS_NAMES, fused=FUSED)
OVIS2_5_NAMES = (
    (r"^tower\.", "visual_tokenizer.vit."),
    (r"^projector\.head\.", "visual_tokenizer.head."),
    (r"^projector\.", ""),
)


def _phi4mm(whole: Json) -> Json:
    """Microsoft's leaves out the tower's sizes, which this one is too small for."""
    transform = {**TRANSFORM, "crop_size": 448, "embedding_cls": "tune_image"}
    return {
        "architectures": ["Phi4MMForCausalLM"],
        "embd_layer": {"embedding_cls": "image_audio", "image_embd_layer": transform},
        "img_processor": None,
        "model_type": "phi4mm",
        **taken(whole, "hidden_size vision_config"),
    }


_PHI4MM_NAMES = (
    (r"img_projection_up\.", "img_projection.0."),
    (r"img_projection_down\.", "img_projection.2."),
    (r"global_img_feature_extensor", "glb_GN"),
    (r"sub_img_feature_extensor", "sub_GN"),
)
PHI3_NAMES = (
    (r"^tower\.", "model.vision_embed_tokens.img_processor.vision_model."),
    (r"^projector\.", "model.vision_embed_tokens."),
    *_PHI4MM_NAMES,
)
save_phi4mm = save_published(_phi4mm, _PHI4MM_NAMES)


HY4_NAMES = ((r"^tower\.", "vit."), *((re.escape(new), re.sub(r"[\\^]", "", old)) for old, new in NAMES))
PHI4_SIGLIP_NAMES = (
    (r"^tower\.", "model.vision_tower.vision_tower.vision_model."),
    (r"^projector\.linear_1\.", "model.mm_projector.0."),
    (r"^projector\.linear_2\.", "model.mm_projector.2."),
)


def _videollama3(whole: Json) -> Json:
    vision = {name: value for name, value in whole["vision_config"].items() if name != "rope_parameters"}
    return {
        **whole["text_config"],
        "architectures": ["Videollama3Qwen2ForCausalLM"],
        "image_token_index": whole["image_token_id"],
        "mm_projector_type": "mlp2x_gelu",
        "model_type": "videollama3_qwen2",
        "use_token_compression": True,
        "vision_encoder": None,
        "vision_encoder_config": {**vision, "model_type": "videollama3_vision_encoder"},
    }


_VIDEO_LLAMA_NAMES = (
    (r"^model\.vision_model\.", "model.vision_encoder."),
    (r"^model\.projector\.", "model.mm_projector."),
    (r"^model\.language_model\.", "model."),
)
save_videollama3 = save_published(_videollama3, _VIDEO_LLAMA_NAMES)
DOTS_NAMES = (
    (r"^tower\.norm\.", "tower.post_trunk_norm."),
    (r"^tower\.", "vision_tower."),
    (r"\.patch_embed\.", ".patch_embed.patchifier."),
    (r"\.gate_proj\.", ".fc1."),
    (r"\.down_proj\.", ".fc2."),
    (r"\.up_proj\.", ".fc3."),
)
TIMM_NAMES = (
    (r"^tower\.embeddings\.patch_embedding\.", "vision.patch_embed.proj."),
    (r"^tower\.embeddings\.position_embedding\.weight$", "vision.pos_embed"),
    (r"^tower\.post_layernorm\.", "vision.norm."),
    (r"^tower\.encoder\.layers\.", "vision.blocks."),
    (r"\.layer_norm([12])\.", r".norm\1."),
    (r"\.self_attn\.out_proj\.", ".attn.proj."),
    (r"\.self_attn\.", ".attn."),
)
MOONDREAM_NAMES = (
    *TIMM_NAMES,
    (r"^projector\.0\.", "vision.proj_mlp.fc1."),
    (r"^projector\.2\.", "vision.proj_mlp.fc2."),
    (r"^start\.weight$", "text.wte"),
    (r"(?<=\.)patch_embed\.proj\.", "patch_emb."),
    (r"\.pos_embed$", ".pos_emb"),
    (r"^vision\.norm\.", "vision.post_ln."),
    (r"\.norm([12])\.", r".ln\1."),
    (r"^", "model."),
)
ONEVISION_NAMES = (
    (r"^tower\.patch_embed\.1\.", "model.visual.embeddings.patch_embedding."),
    (r"^tower\.patch_embed\.3\.", "model.visual.layernorm_pre."),
    (r"^tower\.blocks\.(\d+)\.(norm\d)", r"model.visual.encoder.layers.\1.layer_\2"),
    (r"^tower\.blocks\.", "model.visual.encoder.layers."),
    (r"^tower\.", "model.visual."),
    (r"\.attn\.", ".self_attn."),
)
