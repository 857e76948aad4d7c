"""Rows of a server, against vLLM's own modules of towers that transformers has no classes for, both in float32."""

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from tests.engines.vllm.checkpoints import WRITE
from transformers import CLIPVisionConfig, PreTrainedConfig, Siglip2VisionConfig
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.parallel_state import ensure_model_parallel_initialized, init_distributed_environment
from vllm.model_executor.models import (
    dots_ocr,
    keye,
    keye_vl1_5,
    kimi_k25_vit,
    lfm2_siglip2,
    llava_onevision2,
    moondream3,
    ovis,
    ovis2_5,
    phi3v,
    utils,
)
from vllm.transformers_utils.configs import dotsocr
from vllm.transformers_utils.configs.kimi_k3 import KimiK3Config
from vllm.transformers_utils.configs.moondream3 import Moondream3Config
from vllm.transformers_utils.processors.moondream3 import Moondream3Processor

from servers import PYTHON, serving
from vitwire import Client, Item

_PROJECTOR = utils.WeightsMapper(orig_to_new_substr={"projector.proj.0": "projector.linear_1", ".proj.2": ".linear_2"})
_VISUAL = utils.WeightsMapper(orig_to_new_prefix={"model.visual.": "visual."})
_PHI = utils.WeightsMapper(orig_to_new_prefix={"model.vision_tower.": "", "model.": ""})
_WIDE = """  # as wide as vLLM's module asserts; CLIP's own activation is a kernel that CPUs lack
from vitwire_server.demo import models, saving
demo = models.DEMO_MODELS["phi3_v"]
vision = {**demo.published["vision_config"], "hidden_act": "gelu", "hidden_size": 1024, "image_size": 336}
own = {**demo.published["img_processor"], "image_dim_out": 1024}
given = {**demo.published, "img_processor": own, "vision_config": vision}
models.DEMO_MODELS["phi3_v"] = models._authors("phi3_v", given, saving.PHI3_NAMES, demo)
"""
_SHAPES = {"moondream3": (7, 3, 56, 56), "phi3_v": (3, 3, 336, 336), "phi4-siglip": (35, 768)}
_SIGLIP: Any = {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6}
_NAVIT: Any = {"num_patches": -1, "preserve_original_pe": True, "temporal_patch_size": 1, "use_rope": True, **_SIGLIP}
_NAVIT |= {"attention_dropout": 0.0, "fullatt_block_indexes": None, "window_size": 112}


def _dots_ocr(whole: Any, settings: Any) -> Any:
    whole.vision_tower = dots_ocr.DotsVisionTransformer(dotsocr.DotsVisionConfig(**settings["vision_config"]))
    return lambda pixels, grid: whole.vision_tower(pixels, [grid])


def _keye(whole: Any, settings: Any) -> Any:
    vision, text = (PreTrainedConfig(**own) for own in (_SIGLIP | settings["vision_config"], settings))
    split = settings["model_type"] == "KeyeVL1_5"
    whole.visual = keye.KeyeSiglipVisionModel(vision)
    whole.mlp_AR = (keye_vl1_5.KeyeVL1_5Projector if split else keye.Projector)(text, vision)

    def run(pixels: torch.Tensor, grid: tuple[int, int, int]) -> Any:
        """As `_process_video_embeds` does."""
        grids = [(1, *grid[1:])] * grid[0] if split else [grid]
        given = {"cu_seqlens": torch.arange(len(grids) + 1, dtype=torch.int32) * (len(pixels) // len(grids))}
        given |= {"position_ids": torch.arange(len(pixels)) % (grid[1] * grid[2])}
        states = whole.visual(
            pixels.view(-1, 3, 14, 14), image_grid_thw=grids, interpolate_pos_encoding=True, use_rope=True, **given
        )
        return torch.cat(whole.mlp_AR(states, grids))

    return run


def _kimi_k3(whole: Any, settings: Any) -> Any:
    config = KimiK3Config(**settings)
    tower = whole.vision_tower = kimi_k25_vit.MoonViT3dPretrainedModel(config.vision_config)
    whole.mm_projector = kimi_k25_vit.KimiK25MultiModalProjector(config.vision_config, config.text_config.hidden_size)

    def run(pixels: torch.Tensor, grid: tuple[int, int, int]) -> Any:
        patches, grids = pixels.view(-1, 3, 14, 14), torch.tensor([grid])
        return kimi_k25_vit.vision_tower_forward(tower, patches, grids, whole.mm_projector, False)[0]

    return run


def _onevision2(whole: Any, settings: Any) -> Any:
    vision = SimpleNamespace(**settings["vision_config"])
    whole.visual = llava_onevision2.LlavaOnevision2VisionTower(vision, settings["text_config"]["hidden_size"])

    def run(pixels: torch.Tensor, grid: tuple[int, int, int]) -> Any:
        """Of the tokens that vLLM expects of this size."""
        _, h, w = grid
        numbers = torch.arange(h * w).view(h // 2, 2, w // 2, 2).transpose(1, 2).flatten()
        places = torch.stack([torch.zeros_like(numbers), numbers // w, numbers % w], dim=1)
        rows = whole.visual(pixels, torch.tensor([grid]), places)
        info: Any = object.__new__(llava_onevision2.LlavaOnevision2ProcessingInfo)
        info.get_hf_config = lambda: SimpleNamespace(vision_config=vision)
        bounds = SimpleNamespace(min_pixels=28 * 28, max_pixels=1 << 20)
        tokens = info.get_num_image_tokens(image_width=w * 14, image_height=h * 14, image_processor=bounds)
        assert len(rows) == tokens
        return rows

    return run


def _moondream3(whole: Any, settings: Any) -> Any:
    whole.__class__, whole.config = moondream3.Moondream3ForCausalLM, Moondream3Config(**settings)
    vision, width = whole.config.vision_config, whole.config.text_config.dim
    whole.vision = moondream3.Moondream3VisionEncoder(vision)
    whole.vision_proj = moondream3.Moondream3VisionProjection(vision.enc_dim, vision.proj_inner_dim, width)
    whole.text = torch.nn.ModuleDict({"wte": torch.nn.Embedding(2, width)})
    whole.text.embed_input_ids = whole.text["wte"].forward
    return lambda pixels, grid: whole.embed_multimodal(pixel_values=[pixels], tilings=[grid[1:]])[0]


def _ovis2_5(whole: Any, settings: Any) -> Any:
    vision, words = PreTrainedConfig(**_NAVIT, **settings["vit_config"]), settings["visual_vocab_size"]
    vision.model_type = "siglip2_navit"
    whole.visual_tokenizer = ovis2_5.VisualTokenizer(vision, words)
    whole.vte = ovis.VisualEmbedding(words, settings["hidden_size"])
    return lambda pixels, grid: whole.vte(whole.visual_tokenizer(pixels, torch.tensor([grid])))


def _phi3(whole: Any, settings: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(phi3v, "CLIP_VIT_LARGE_PATCH14_336_CONFIG", CLIPVisionConfig(**settings["vision_config"]))
        whole.vision_embed_tokens = phi3v.Phi3HDImageEmbedding(PreTrainedConfig(**settings), None)
    return lambda pixels, grid: whole.vision_embed_tokens(pixels[None], 14 * torch.tensor([grid[1:]]))[0]


def _phi4_siglip(whole: Any, settings: Any) -> Any:
    """As `Phi4ForCausalLMV` does, whose module needs another package."""
    vision, width = Siglip2VisionConfig(**settings["vision_config"]), settings["hidden_size"]
    layers = {"num_hidden_layers_override": vision.num_hidden_layers - 1, "require_post_norm": False}
    tower = whole.vision_tower = lfm2_siglip2.Siglip2Model(vision, **layers)
    steps = (torch.nn.Linear(vision.hidden_size, width), torch.nn.GELU(), torch.nn.Linear(width, width))
    projector = whole.mm_projector = torch.nn.Sequential(*steps)

    def run(pixels: torch.Tensor, grid: tuple[int, int, int]) -> Any:
        packed = {"cu_seqlens": torch.tensor([0, len(pixels)], dtype=torch.int32), "select_layers": [-2]}
        packed |= {"spatial_shapes": torch.tensor([grid[1:]]), "max_seqlen": torch.tensor(len(pixels))}
        return projector(tower(pixel_values_packed=pixels, **packed).view(len(pixels), -1))

    return run


@pytest.mark.parametrize(
    ("model_type", "make", "grid", "mapper"),
    [
        ("dots_ocr", _dots_ocr, (1, 10, 8), dots_ocr.DotsOCRForCausalLM.hf_to_vllm_mapper),
        ("Keye", _keye, (3, 10, 8), None),
        ("KeyeVL1_5", _keye, (3, 10, 8), None),
        ("kimi_k3", _kimi_k3, (1, 10, 8), _PROJECTOR),
        ("llava_onevision2", _onevision2, (1, 10, 8), _VISUAL),
        ("moondream3", _moondream3, (7, 3, 2), None),
        ("ovis2_5", _ovis2_5, (3, 10, 8), None),
        ("phi3_v", _phi3, (1, 48, 24), _PHI),
        ("phi4-siglip", _phi4_siglip, (1, 5, 7), _PHI),
    ],
)
def test_rows_are_those_of_vllms_modules(model_type: str, make: Any, grid: Any, mapper: Any, tmp_path: Path) -> None:
    script = _WIDE + WRITE if model_type == "phi3_v" else WRITE
    subprocess.run([PYTHON, "-c", script, str(tmp_path), model_type], check=True, capture_output=True)
    folder, whole = tmp_path / model_type, torch.nn.Module()
    weights = {name: own.float() for shard in folder.glob("*.safetensors") for name, own in load_file(shard).items()}
    named = {name: own for name, own in weights.items() if name != "embed_tokens.weight"}
    shape = _SHAPES.get(model_type, (np.prod(grid), 588))
    pixels = np.random.default_rng(3).standard_normal(shape).astype(np.float32)
    with set_current_vllm_config(VllmConfig()), torch.inference_mode():
        init_distributed_environment(1, 0, f"file://{tmp_path}/group", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        run = make(whole, json.loads((folder / "config.json").read_text()))
        if hasattr(whole, "load_weights"):
            whole.load_weights(named.items())
        else:
            utils.AutoWeightsLoader(whole).load_weights(named.items(), mapper=mapper)
        for method, module in ((getattr(each, "quant_method", None), each) for each in whole.modules()):
            if method:
                method.process_weights_after_loading(module)
        expected = run(torch.from_numpy(pixels), grid).numpy()
    with serving(folder, "--dtype", "float32") as server, Client(server.target) as client:
        is_clip = grid[0] > 1 and pixels.ndim == 2
        (rows,) = client.encode([Item(pixels, grid, modality="video" if is_clip else "image")])
    assert np.abs(rows.numpy() - expected).max() <= 1e-5 * np.abs(expected).max()


def test_pictures_are_cut_as_by_vllms_processor(tmp_path: Path) -> None:
    """Moondream's, before they are rounded to bfloat16."""
    subprocess.run([PYTHON, "-c", WRITE, str(tmp_path), "moondream3"], check=True, capture_output=True)
    processor = object.__new__(Moondream3Processor)
    noise = np.random.default_rng(5).integers(0, 256, (20, 30, 3), np.uint8)
    pictures = [Image.fromarray(noise).resize(size) for size in ((300, 200), (60, 500), (20, 30))]
    sizes = {"max_crops": 6, "overlap_margin": 1, "crop_size": 56}
    cut = [processor.preprocess_image(picture, **sizes, return_tensors="np") for picture in pictures]
    outputs = {"pixel_values": [pixels for pixels, _ in cut], "tilings": [tiling for _, tiling in cut]}
    with serving(tmp_path / "moondream3", "--dtype", "float32") as server, Client(server.target) as client:
        theirs, own = client.encode(Item.from_processor(outputs)), client.encode_images(pictures)
    for expected, rows in zip(theirs, own, strict=True):
        assert len(expected.numpy()) == 17
        assert np.abs(rows.numpy() - expected.numpy()).max() <= 1e-4 * np.abs(expected.numpy()).max()
