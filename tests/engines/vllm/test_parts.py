"""Embeddings as inputs, parsed back by vLLM's own front end and by its model classes."""

import importlib
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.multimodal.utils import group_and_batch_mm_kwargs
from vllm.renderers import ChatParams
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.input_processor import InputProcessor

from vitwire import Embedding, Model, Report
from vitwire.integrations.vllm import image_embeds, image_part, reference_part, video_part

GRIDS = [(1, 4, 4), (1, 4, 8), (1, 4, 8)]
CLIP = (3, 4, 4)
SECONDS = [0.5, 1.5, 2.5]
WIDTHS = dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_5", "internvl"), (64, 0))
WIDTHS |= {"qwen3_vl": (192, 2), "dots_ocr": (48, 0)}
QWEN = [name for name in WIDTHS if name.startswith("qwen")]
Frontends = Callable[[str], InputProcessor]


@pytest.fixture(scope="module")
def frontends(checkpoints: dict[str, Path]) -> Frontends:
    """vLLM's front end for a tiny model of each type, with `--enable-mm-embeds`."""

    @cache
    def frontend(model_type: str) -> InputProcessor:
        limits = {"image": 0} if model_type in ("internvl", "dots_ocr") else {"image": 0, "video": 0}
        arguments = EngineArgs(
            str(checkpoints[model_type]),
            max_model_len=512,
            enforce_eager=True,
            enable_mm_embeds=True,
            limit_mm_per_prompt=limits,
        )
        return InputProcessor(arguments.create_engine_config())

    return frontend


@pytest.fixture
def describe(model: Model) -> Callable[[str], Model]:
    """What a server of this type says about its model."""

    def described(model_type: str) -> Model:
        width, levels = WIDTHS[model_type]
        return replace(model, model_type=model_type, embedding_width=width, deepstack_levels=levels)

    return described


def embedding(model: Model, grid: tuple[int, int, int], dtype: str = "bfloat16", **report: Any) -> Embedding:
    """Random rows, as a client receives them."""
    rows = np.random.default_rng(sum(grid)).integers(0, 0x3F80, (int(np.prod(grid)) // 4, model.embedding_width))
    stored = rows.astype("<u2") if dtype == "bfloat16" else rows.astype("<f4" if dtype == "float32" else "<f2")
    return Embedding(stored, dtype, model.deepstack_levels, Report(**report), grid)


def chat(frontend: InputProcessor, parts: list[dict[str, Any]], **extras: Any) -> Any:
    """The request that the engine gets for a chat completion with these parts."""
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "?"}]}]
    (_,), (prompt,) = frontend.renderer.render_chat([messages], ChatParams(), prompt_extras=extras)
    return frontend.process_inputs("request", prompt, SamplingParams(), ("generate",))


@pytest.mark.parametrize("model_type", WIDTHS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_content_parts(frontends: Frontends, describe: Any, model_type: str, dtype: str) -> None:
    model = describe(model_type)
    embeddings = [embedding(model, grid, dtype) for grid in GRIDS]
    parts = [image_part(each, model, uuid=f"image {number}") for number, each in enumerate(embeddings)]
    request = chat(frontends(model_type), parts)
    assert [feature.identifier for feature in request.mm_features] == ["image 0", "image 1", "image 2"]
    for feature, each in zip(request.mm_features, embeddings, strict=True):
        data = feature.data.get_data()
        assert torch.equal(data["image_embeds"].reshape(each.shape), each.torch())
        assert feature.mm_position.get_num_embeds() == each.shape[0]
        if model_type != "internvl":
            assert data["image_grid_thw"].tolist() == list(each.grid)
    unnamed = chat(frontends(model_type), [image_part(embeddings[0], model)])
    assert torch.equal(unnamed.mm_features[0].data.get_data()["image_embeds"], embeddings[0].torch())


@pytest.mark.parametrize("model_type", QWEN)
def test_options_beside_embeddings(frontends: Frontends, describe: Any, model_type: str) -> None:
    """vLLM keeps the grid that the encoder chose by the same options, and names the content by them too."""
    model = describe(model_type)
    each = embedding(model, (1, 8, 12))
    names = set[str]()
    for options in ({}, {"max_pixels": 9000}, {"size": {"shortest_edge": 4096, "longest_edge": 9000}}):
        request = chat(frontends(model_type), [image_part(each, model, uuid="cat")], mm_processor_kwargs=options)
        (feature,) = request.mm_features
        assert feature.data.get_data()["image_grid_thw"].tolist() == list(each.grid)
        assert feature.mm_position.get_num_embeds() == each.shape[0]
        names.add(feature.identifier)
    assert len(names) == 3


@pytest.mark.parametrize("model_type", WIDTHS)
def test_offline_data(frontends: Frontends, describe: Any, model_type: str) -> None:
    model = describe(model_type)
    embeddings = [embedding(model, grid) for grid in GRIDS]
    prompt = {
        "prompt": ("<|imgpad|>" if model_type == "dots_ocr" else "<|image_pad|>") * len(GRIDS),
        "multi_modal_data": image_embeds(embeddings, model),
        "multi_modal_uuids": {"image": ["a", "b", "c"]},
    }
    request = frontends(model_type).process_inputs("request", prompt, SamplingParams(), ("generate",))
    for feature, each in zip(request.mm_features, embeddings, strict=True):
        assert torch.equal(feature.data.get_data()["image_embeds"].reshape(each.shape), each.torch())
        assert feature.mm_position.get_num_embeds() == each.shape[0]


@pytest.mark.parametrize("model_type", QWEN)
def test_clips(frontends: Frontends, describe: Any, model_type: str) -> None:
    model, frontend = describe(model_type), frontends(model_type)
    clip = embedding(model, CLIP)
    name = {"qwen2_vl": "", "qwen2_5_vl": "second_per_grid_ts"}.get(model_type, "timestamps")
    offline = {
        "prompt": "<|vision_start|><|video_pad|><|vision_end|>",
        "multi_modal_data": image_embeds([clip], model, modality="video", timestamps=[SECONDS]),
    }
    for request in (
        chat(frontend, [video_part(clip, model, timestamps=SECONDS)]),
        frontend.process_inputs("request", offline, SamplingParams(), ("generate",)),
    ):
        (feature,) = request.mm_features
        data = feature.data.get_data()
        assert torch.equal(data["video_embeds"], clip.torch())
        assert data["video_grid_thw"].tolist() == list(CLIP)
        assert feature.mm_position.get_num_embeds() == len(clip.numpy())
        if name:
            expected = SECONDS if name == "timestamps" else [1.0]
            assert torch.as_tensor(data[name]).flatten().tolist() == expected


def test_references(frontend: InputProcessor, describe: Any) -> None:
    """Metadata only, which an engine with an EC connector accepts."""
    model = describe("qwen3_vl")
    clip = reference_part(CLIP, model, "clip", modality="video", timestamps=SECONDS)
    request = chat(frontend, [reference_part(GRIDS[1], model, "cat"), clip])
    image, video = request.mm_features
    assert (image.identifier, video.identifier) == ("cat", "clip")
    assert image.data.get_data()["image_grid_thw"].tolist() == list(GRIDS[1])
    assert image.mm_position.get_num_embeds() == 8
    assert video.data.get_data()["timestamps"].tolist() == SECONDS
    assert video.mm_position.get_num_embeds() == 12


@pytest.mark.parametrize("model_type", QWEN)
def test_references_need_a_connector(frontends: Frontends, describe: Any, model_type: str) -> None:
    with pytest.raises(ValueError, match="image_embeds"):
        chat(frontends(model_type), [reference_part(GRIDS[0], describe(model_type), "cat")])


@pytest.mark.parametrize("model_type", QWEN)
def test_the_model_takes_them(frontends: Frontends, describe: Any, model_type: str) -> None:
    """vLLM's model class splits them by image, and Qwen3-VL's splits off the deepstack levels."""
    described, frontend = describe(model_type), frontends(model_type)
    embeddings = [embedding(described, grid) for grid in GRIDS]
    request = chat(frontend, [image_part(each, described) for each in embeddings])
    items = [(feature.modality, feature.data) for feature in request.mm_features]
    ((_, count, fields),) = group_and_batch_mm_kwargs(items)
    assert count == len(GRIDS)
    kind = _class(model_type)
    stand_in = SimpleNamespace(visual=SimpleNamespace(dtype=torch.bfloat16, spatial_merge_size=2))
    parsed = kind._parse_and_validate_image_input(stand_in, **fields)
    rows = kind._process_image_input(stand_in, parsed)
    for each, expected in zip(rows, embeddings, strict=True):
        assert torch.equal(each, expected.torch())
    if model_type == "qwen3_vl":
        _check_deepstack(kind, rows, embeddings)


def _check_deepstack(kind: Any, rows: Any, embeddings: list[Embedding]) -> None:
    stand_in = SimpleNamespace(visual_dim=64, multiscale_dim=128, deepstack_num_level=2)
    count = sum(len(each) for each in rows)
    prompt, places = torch.zeros(count + 2, 64), torch.tensor([False, *[True] * count, False])
    levels, main = kind._compute_deepstack_embeds(stand_in, prompt, rows, places)
    for each, expected in zip(main, embeddings, strict=True):
        assert np.array_equal(each.float().numpy(), expected.main)
    for index, level in enumerate(levels):
        assert np.array_equal(level[1:-1].numpy(), np.concatenate([each.deepstack[index] for each in embeddings]))


def _class(model_type: str) -> Any:
    module = importlib.import_module(f"vllm.model_executor.models.{model_type}")
    names = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL", "qwen3_5": "Qwen3_5"}
    return getattr(module, f"{names[model_type]}ForConditionalGeneration")
