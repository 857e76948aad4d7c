"""What processors of Hugging Face make of photographs, as an attached model takes it."""

import inspect
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoImageProcessor

from checkpoints import Checkpoints
from reference import TOLERANCE
from vitwire.integrations.transformers import attach
from vlms import TowerEncoder, language_model, owner_of

AUTO = ("qwen2_vl", "qwen3_vl", "glm4v", "paddleocr_vl", "ernie4_5_vl_moe", "video_llama_3", "hunyuan_vl")
PROCESSORS = {
    **dict.fromkeys(AUTO, ""),
    **dict.fromkeys(("internvl", "aya_vision", "got_ocr2", "qianfan_ocr"), "got_ocr2.GotOcr2"),
    **dict.fromkeys(("llava", "vipllava"), "llava.Llava"),
    **dict.fromkeys(("llava-siglip", "paligemma"), "siglip.Siglip"),
    **dict.fromkeys(("llava_next-siglip", "llava_next_video", "llava_next"), "llava_next.LlavaNext"),
    "llava_onevision": "llava_onevision.LlavaOnevision",
    "janus": "janus.Janus",
    **dict.fromkeys(("gemma3", "t5gemma2"), "gemma3.Gemma3"),
    **dict.fromkeys(("gemma4", "diffusion_gemma"), "gemma4.Gemma4"),
    "ovis2": "ovis2.Ovis2",
    **dict.fromkeys(("llava-pixtral", "mistral3", "mistral_large4", "lighton_ocr"), "pixtral.Pixtral"),
    "florence2": "clip.CLIP",
    "aria": "aria.Aria",
    "minicpmv4_6": "minicpmv4_6.MiniCPMV4_6",
    "deepseek_vl": "deepseek_vl.DeepseekVL",
    "deepseek_vl_hybrid": "deepseek_vl_hybrid.DeepseekVLHybrid",
    "deepseek_ocr2": "deepseek_ocr2.DeepseekOcr2",
    "idefics2": "idefics2.Idefics2",
    "idefics3": "idefics3.Idefics3",
    "smolvlm": "smolvlm.SmolVLM",
    "granite_docling": "granite_docling.GraniteDocling",
}
"""Package and name of the processor; those of other models need torchvision."""
MERGED = ("mistral3", "mistral_large4", "lighton_ocr")
"""Models whose tokens are of several of Pixtral's patches."""
SIZES = [(300, 420), (90, 60), (200, 200)]


def processed(model_type: str, folder: Any) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    first, *others = [Image.fromarray(rng.integers(0, 255, (h, w, 3), np.uint8)) for h, w in SIZES]
    if not PROCESSORS[model_type]:
        processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    else:
        package, name = PROCESSORS[model_type].split(".")
        module = import_module(f"transformers.models.{package}.image_processing_pil_{package}")
        factor = {"patch_size": {"height": 28, "width": 28}} if model_type in MERGED else {}
        processor = getattr(module, f"{name}ImageProcessorPil").from_pretrained(folder, **factor)
    # LLaVA-OneVision cuts images in another way where a prompt has several; Idefics pads the tiles of prompts.
    by_prompt = model_type in {"llava_onevision", "idefics2", "idefics3", "smolvlm", "granite_docling"}
    prompts = [[first], others] if by_prompt else [first, *others]
    return dict(processor(images=prompts, return_tensors="pt"))


def rows(output: Any) -> Tensor:
    parts = (output.pooler_output, *(getattr(output, "deepstack_features", None) or ()))
    return torch.cat([torch.cat([item.flatten() for item in part]) for part in parts])


@pytest.mark.parametrize(
    "model_type",
    [name if name == "llava_onevision" else pytest.param(name, marks=pytest.mark.matrix) for name in PROCESSORS],
)
@torch.no_grad()
def test_features_of_photographs_are_those_of_the_local_tower(model_type: str, checkpoints: Checkpoints) -> None:
    folder = checkpoints(model_type)
    model = language_model(model_type, folder)
    features = owner_of(model).get_image_features
    taken = inspect.signature(features).parameters
    arguments = {name: value for name, value in processed(model_type, folder).items() if name in taken}
    local = rows(features(**arguments))
    attach(model, TowerEncoder(folder))
    remote = rows(owner_of(model).get_image_features(**arguments))
    assert remote.shape == local.shape
    assert (remote - local).abs().max() <= TOLERANCE * local.abs().max()
