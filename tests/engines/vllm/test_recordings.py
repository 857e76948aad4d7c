"""Requests of real routers, read by vLLM from its request model on, and run by its scheduler and the connector."""

from base64 import b64encode
from collections.abc import Callable, Mapping
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.engines.vllm.conftest import Engines
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.model_executor.models.qwen3_vl import Qwen3VLForConditionalGeneration, Qwen3VLProcessingInfo
from vllm.multimodal.utils import group_and_batch_mm_kwargs
from vllm.multimodal.video import Qwen3VLVideoBackend, VideoSourceMetadata, VideoTargetMetadata
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.input_processor import InputProcessor

from routers import clip_file, picture, sent_to_engine
from servers import ServerProcess
from vitwire import Client, Embedding, Item

FRAMES, RATE = 30, 10.0
MODES = ("inline", "reference")
Json = dict[str, Any]
Recorded = Callable[[str], Json]


@pytest.fixture(scope="module")
def mp4() -> bytes:
    return clip_file(FRAMES, RATE)


@pytest.fixture(scope="module")
def pictures() -> list[str]:
    return [picture(32, 32, 1), picture(64, 32, 2)]


@pytest.fixture(scope="module")
def recorded(
    server: ServerProcess, mp4: bytes, pictures: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Recorded:
    """What a router of each mode sends for two images, one of them twice, and a clip."""
    image, other = ({"type": "image_url", "image_url": {"url": url, "detail": "low"}} for url in pictures)
    clip = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64," + b64encode(mp4).decode()}}
    parts = [{"type": "text", "text": "A"}, image, clip | {"uuid": "the caller's"}, other, image]
    key = tmp_path_factory.mktemp("keys") / "content"
    key.write_text("k" * 64)
    flag = f"--content-key-file={key}"
    return cache(lambda mode: sent_to_engine(server.target, parts, f"--mode={mode}", flag, temperature=0.5))


@pytest.fixture(scope="module")
def encoded(client: Client, mp4: bytes, pictures: list[str]) -> tuple[list[Embedding], Embedding]:
    """The rows as a client gets them: of the images, and of the clip."""
    return client.encode_images(pictures), client.encode([Item(encoded=mp4, modality="video")])[0]


def ids_of(body: Json) -> list[str]:
    return [part["uuid"] for part in body["messages"][0]["content"] if "uuid" in part]


async def read(frontend: InputProcessor, body: Json) -> Any:
    """The engine's request, as vLLM's HTTP server makes it from a body."""
    request = ChatCompletionRequest.model_validate(body)
    assert request.temperature == 0.5
    params = request.build_chat_params(None, "auto")
    (_,), (prompt,) = await frontend.renderer.render_chat_async([request.messages], params)
    return frontend.process_inputs("request", prompt, SamplingParams(max_tokens=2, ignore_eos=True), ("generate",))


def data_of(core: Any) -> list[Mapping[str, Any]]:
    return [feature.data.get_data() for feature in core.mm_features]


@pytest.mark.parametrize("mode", MODES)
async def test_vllm_sees_each_image_and_clip_under_its_id(
    mode: str, recorded: Recorded, encoded: tuple[list[Embedding], Embedding], frontend: InputProcessor
) -> None:
    images, clip = encoded
    body = recorded(mode)
    core = await read(frontend, body)
    expected = [images[0], clip, images[1], images[0]]
    assert [feature.identifier for feature in core.mm_features] == ids_of(body)
    assert len(set(ids_of(body))) == 3
    assert [feature.modality for feature in core.mm_features] == ["image", "video", "image", "image"]
    for feature, data, embedding in zip(core.mm_features, data_of(core), expected, strict=True):
        kind = feature.modality
        assert data[f"{kind}_grid_thw"].tolist() == list(embedding.grid)
        assert feature.mm_position.get_num_embeds() == len(embedding.numpy())
        if mode == "inline":
            torch.testing.assert_close(data[f"{kind}_embeds"], embedding.torch(), rtol=0, atol=0.02)
        else:
            assert f"{kind}_embeds" not in data


async def test_both_modes_have_the_same_prompt_and_ids(recorded: Recorded, frontend: InputProcessor) -> None:
    """So that vLLM's prefix cache holds across them."""
    inline, reference = [await read(frontend, recorded(mode)) for mode in MODES]
    assert inline.prompt_token_ids == reference.prompt_token_ids
    assert ids_of(recorded("inline")) == ids_of(recorded("reference"))


@pytest.mark.parametrize("mode", MODES)
async def test_a_clip_has_the_times_that_vllm_gives_its_frames(
    mode: str, recorded: Recorded, encoded: tuple[list[Embedding], Embedding], frontend: InputProcessor
) -> None:
    """And its prompt their text."""
    source = VideoSourceMetadata(total_frames_num=FRAMES, original_fps=RATE, duration=FRAMES / RATE)
    target = VideoTargetMetadata(num_frames=-1, fps=2, max_duration=300)
    indices = Qwen3VLVideoBackend.compute_frames_index_to_sample(source, target)
    seconds = Qwen3VLProcessingInfo._calculate_timestamps(None, indices, RATE, 2)
    assert encoded[1].report.frame_seconds == pytest.approx([index / RATE for index in indices])
    core = await read(frontend, recorded(mode))
    assert data_of(core)[1]["timestamps"].tolist() == pytest.approx(seconds)
    text = frontend.tokenizer.decode(core.prompt_token_ids)
    places = [text.index(f"<{each:.1f} seconds><|vision_start|>") for each in seconds]
    assert places == sorted(places)


async def test_the_model_takes_what_came_inline(
    recorded: Recorded, encoded: tuple[list[Embedding], Embedding], frontend: InputProcessor
) -> None:
    core = await read(frontend, recorded("inline"))
    items = [(feature.modality, feature.data) for feature in core.mm_features if feature.modality == "video"]
    ((_, count, fields),) = group_and_batch_mm_kwargs(items)
    assert count == 1
    kind = Qwen3VLForConditionalGeneration
    stand_in = SimpleNamespace(visual=SimpleNamespace(dtype=torch.bfloat16, spatial_merge_size=2))
    (rows,) = kind._process_video_input(stand_in, kind._parse_and_validate_video_input(stand_in, **fields))
    torch.testing.assert_close(rows, encoded[1].torch(), rtol=0, atol=0.02)
    config = frontend.model_config.hf_config
    positions, _ = kind._get_mrope_input_positions(core.prompt_token_ids, core.mm_features, config)
    assert positions.shape == (3, len(core.prompt_token_ids))


async def test_the_connector_fetches_what_the_router_stored(
    engines: Engines, recorded: Recorded, encoded: tuple[list[Embedding], Embedding], frontend: InputProcessor
) -> None:
    images, clip = encoded
    engine = engines()
    name = engine.queue(await read(frontend, recorded("reference")))
    engine.run(name)
    assert not engine.errors
    assert engine.stats["fetched"] == 3
    expected = torch.cat([each.torch() for each in (images[0], clip, images[1], images[0])])
    torch.testing.assert_close(torch.cat(engine.gathered[name]), expected, rtol=0, atol=0.02)
