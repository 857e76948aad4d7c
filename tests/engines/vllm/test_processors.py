"""vLLM's own processors and our server, for the same pictures: places in the prompt, grids and pixels.

Not compared, though vLLM 0.33 takes embeddings for them: LLaVA, LLaVA-NeXT, LLaVA-OneVision, Mistral 3 and LightOnOCR
(their modules need mistral_common), SmolVLM (num2words), Phi-3 Vision, MiniCPM-V up to 4.5 and Ling 3.0 VL (processors
are code on the hub, the count of places too), Step (vLLM has the published sizes only), DeepSeek-VL2 (places for line
breaks are the LLM's), MiniMax M3 (bounds of areas are vLLM's own), and those that need further files: Gemma 4,
PaliGemma, Eagle 2.5, Nemotron, Qianfan-OCR, Cohere Compass, GLM-OCR.
"""

import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tests.engines.vllm.checkpoints import WRITE, write_tokenizer
from transformers import PreTrainedConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models.registry import ModelRegistry
from vllm.multimodal.processing import InputProcessingContext, ProcessorInputs, TimingContext
from vllm.tokenizers import get_tokenizer
from vllm.transformers_utils.config import get_config

from servers import PYTHON

Json = dict[str, Any]
SIZES = [(64, 64), (300, 200), (900, 30), (30, 500), (9, 7), (1300, 1000)]


_PREPARE = """
import json
import numpy as np
from PIL import Image
from broken import load
from prepared import image, recipes
from vitwire_server.core.grids import Grid
for name in sys.argv[2:]:
    folder = Path(sys.argv[1]) / name
    tower, found, arrays = load(folder).tower, {}, {}
    own = {str(kind): each for kind, each in recipes(folder).items()}.get("image")
    if own is None:
        sides = range(0, 130, 2)
        found["table"] = [[tower.footprint(Grid(1, h or 2, w or 2)).rows for w in sides] for h in sides]
    else:
        made = [image(Image.open(Path(sys.argv[1]) / f"{number}.png"), own) for number in range(6)]
        found["grids"] = [each.grid for each in made]
        found["rows"] = [tower.footprint(Grid(*each.grid)).rows for each in made]
        form = (1, 1, -1) if own.channels_last else (1, -1, 1)
        for number, each in enumerate(made):
            shaped = each.pixels.reshape(len(each.pixels), *((-1, 3) if own.channels_last else (3, -1)))
            mean, std = (np.reshape(each, form) for each in (own.settings.mean, own.settings.std))
            floats = (shaped * own.settings.rescale_factor - mean) / std
            arrays[str(number)] = floats.reshape(each.pixels.shape).astype(np.float32)
    np.savez(folder / "ours.npz", **arrays)
    (folder / "tokens.json").write_text(json.dumps(found))
"""
_QWEN = "<|image_pad|>"
ROWS: dict[str, tuple[str, str, Json]] = {
    "glm4v": ("Glm4vForConditionalGeneration", "<|image|>", {}),
    "glm5_next": ("Glm5NextForConditionalGeneration", "<|image|>", {}),
    "qwen3_vl_moe": ("Qwen3VLMoeForConditionalGeneration", _QWEN, {}),
    "qwen2_5_omni": ("Qwen2_5OmniForConditionalGeneration", _QWEN, {}),
    "qwen3_omni_moe": ("Qwen3OmniMoeForConditionalGeneration", _QWEN, {}),
    "qwen4_exp": ("Qwen4ExpForConditionalGeneration", _QWEN, {}),
    "hyperclovax_vision_v2": ("HCXVisionV2ForCausalLM", "<|IMAGE_PAD|>", {}),
    "cosmos3_edge": ("Cosmos3EdgeForConditionalGeneration", _QWEN, {}),
    "cohere2_vision": ("Cohere2VisionForConditionalGeneration", _QWEN, {"patch_size": 2}),
    "gemma3": ("Gemma3ForConditionalGeneration", _QWEN, {"image_seq_length": 16}),
    "idefics3": ("Idefics3ForConditionalGeneration", "<image>", {"image_seq_len": 4}),
    "internvl_chat": ("InternVLChatModel", "<IMG_CONTEXT>", {}),
    "skywork_chat": ("SkyworkR1VChatModel", "<IMG_CONTEXT>", {}),
    "h2ovl_chat": ("H2OVLChatModel", "<IMG_CONTEXT>", {}),
    "NVLM_D": ("NVLM_D", "<|vision_pad|>", {}),
    "minicpmv4_6": ("MiniCPMV4_6ForConditionalGeneration", _QWEN, {}),
    "minicpmv4_7": ("MiniCPMV4_7ForConditionalGeneration", _QWEN, {"max_slice_nums": 9}),
    "paddleocr_vl": ("PaddleOCRVLForConditionalGeneration", "<|IMAGE_PLACEHOLDER|>", {}),
}
"""The class in vLLM, the token of a place, and settings of a tiny model's processor."""
COUNTED: dict[str, tuple[str, Json]] = {
    "Keye": ("KeyeForConditionalGeneration", {"mm_kwargs": {}}),
    "KeyeVL1_5": ("KeyeVL1_5ForConditionalGeneration", {"mm_kwargs": {}}),
    "llava_onevision2": ("LlavaOnevision2ForConditionalGeneration", {}),
}
"""Models whose processor is code on the hub; vLLM has the count of places."""


def _pictures() -> list[Image.Image]:
    coarse = Image.fromarray(np.random.default_rng(5).integers(0, 256, (9, 9, 3), np.uint8))
    return [coarse.resize(size, Image.Resampling.BICUBIC) for size in SIZES]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint for each row, and what our server makes of the pictures; all by one process."""
    folder = tmp_path_factory.mktemp("prepared")
    for number, picture in enumerate(_pictures()):
        picture.save(folder / f"{number}.png")
    paths = os.pathsep.join(("client", "gateway", "server", "tests/support"))
    command = [PYTHON, "-c", WRITE + _PREPARE, str(folder), *ROWS, *COUNTED]
    subprocess.run(command, check=True, capture_output=True, env=os.environ | {"PYTHONPATH": paths})
    return folder


def _configuration(folder: Path) -> Any:
    """vLLM's own, or for types that it takes from the hub, the fields as they are."""
    try:
        return get_config(folder, trust_remote_code=False)
    except ValueError:
        fields = json.loads((folder / "config.json").read_text())
        return PreTrainedConfig(
            **{name: PreTrainedConfig(**own) if name.endswith("config") else own for name, own in fields.items()}
        )


def _context(folder: Path, beside: Path, token: str) -> InputProcessingContext:
    """What vLLM gives its processors, with a tokenizer of bytes: the engine's settings are those of another model."""
    write_tokenizer(folder, token)
    config = EngineArgs(model=str(beside), dtype="float32", mm_device_do_normalize=False).create_model_config()
    config.hf_config, config.model = _configuration(folder), str(folder)
    return InputProcessingContext(config, get_tokenizer(str(folder)))


def _counted(fields: Json, table: list[list[int]]) -> int:
    """Rows of an image whose pixels are clients': of its grid, or of its slices."""
    sizes = fields["tgt_sizes"].tolist() if "tgt_sizes" in fields else [fields["image_grid_thw"].tolist()[1:]]
    return sum(table[h // 2][w // 2] for h, w in sizes)


@pytest.mark.parametrize("model_type", ROWS)
def test_prompts_and_pixels_are_the_processors(model_type: str, checkpoint: Path, prepared: Path) -> None:
    (architecture, token, settings), folder, pictures = ROWS[model_type], prepared / model_type, _pictures()
    for path in (folder / "processor_config.json", folder / "preprocessor_config.json"):
        path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | settings))
    context = _context(folder, checkpoint, token)
    processor: Any = ModelRegistry.models[architecture].load_model_cls()._processor_factory.build_processor(context)
    ours, tokens = np.load(folder / "ours.npz"), json.loads((folder / "tokens.json").read_text())
    together = [[1, 2, 3]] * (model_type != "h2ovl_chat")  # it cuts others if they are several: docs/models.md
    for numbers in [[number] for number in range(len(SIZES))] + together:
        text = processor.dummy_inputs.get_dummy_text({"image": len(numbers)})
        prompt = text if isinstance(text, list) else context.tokenizer.encode(text, add_special_tokens=False)
        data = processor.info.parse_mm_data({"image": [pictures[number] for number in numbers]})
        made = processor.apply(ProcessorInputs(prompt, data), TimingContext(enabled=False))
        places = [each.get_num_embeds() for each in made["mm_placeholders"]["image"]]
        fields = [each.get_data() for each in made["mm_kwargs"]["image"]]
        if "grids" not in tokens:
            assert places == [_counted(each, tokens["table"]) for each in fields]
            continue
        assert places == [tokens["rows"][number] for number in numbers]
        for number, each in zip(numbers, fields, strict=True):
            theirs = next(each[name] for name in ("pixel_values", "pixel_values_flat") if name in each).numpy()
            if "image_grid_thw" in each:
                assert each["image_grid_thw"].tolist() == tokens["grids"][number]
            own = ours[str(number)]
            frames = theirs.reshape(*own.shape[:1], 3, -1, own[0].size // 3)[:, :, 0]  # of an image, all are equal
            assert np.abs(frames.reshape(own.shape) - own).max() < 0.1


@pytest.mark.parametrize("model_type", COUNTED)
def test_counts_are_the_rows(model_type: str, checkpoint: Path, prepared: Path) -> None:
    (architecture, more), folder = COUNTED[model_type], prepared / model_type
    kind: Any = ModelRegistry.models[architecture].load_model_cls()
    info = kind._processor_factory.info(_context(folder, checkpoint, "<|image_pad|>"))
    size = json.loads((folder / "preprocessor_config.json").read_text())["size"]
    bounds = {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}
    more = {**more, "image_processor": SimpleNamespace(size=bounds, **bounds)}
    rows = [info.get_num_image_tokens(image_width=width, image_height=height, **more) for width, height in SIZES]
    assert rows == json.loads((folder / "tokens.json").read_text())["rows"]
