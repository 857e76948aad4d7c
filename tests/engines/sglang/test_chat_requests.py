"""Chat requests, read by SGLang from its request model to its receiver, before a real adapter."""

from base64 import b64decode, b64encode
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from sglang.srt.disaggregation.encoder.receiver import create_mm_receiver
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from sglang.srt.layers.rotary_embedding import MRotaryEmbedding
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.multimodal.modality import Modality
from sglang.srt.parser.jinja_template_utils import process_content_for_template_format
from tests.engines.sglang.conftest import SGLang

from adapters import Adapter
from routers import clip_file, picture
from servers import ServerProcess
from vitwire import Client, Embedding, Item

Json = dict[str, Any]
_WORDS = {"image": "<|image_pad|>", "video": "<|video_pad|>"}


@pytest.fixture(scope="module")
def files() -> Sequence[bytes]:
    """A picture and two clips."""
    return b64decode(picture(64, 96).partition(",")[2]), clip_file(30, 10.0), clip_file(7, 5.0)


@pytest.fixture(scope="module")
def embeddings(vitwire: ServerProcess, files: Sequence[bytes]) -> list[Embedding]:
    with Client(vitwire.target) as client:
        return [
            *client.encode_images(files[:1]),
            *client.encode([Item(encoded=each, modality="video") for each in files[1:]]),
        ]


@pytest.fixture(scope="module")
def recorded(files: Sequence[bytes]) -> Json:
    """A clip, a picture and another clip, each with fields of its own."""
    first, second = (_uri("video/mp4", each) for each in files[1:])
    parts = [
        {"type": "text", "text": "w5"},
        {"type": "video_url", "video_url": {"url": first}},
        {"type": "image_url", "image_url": {"url": _uri("image/jpeg", files[0]), "detail": "high"}},
        {"type": "video_url", "video_url": {"url": second, "fps": None}, "uuid": "u"},
    ]
    return {"model": "tiny", "messages": [{"role": "user", "content": parts}]}


def _uri(kind: str, file: bytes) -> str:
    return f"data:{kind};base64,{b64encode(file).decode()}"


def read(body: Json) -> GenerateReqInput:
    """SGLang's request for a body, as its chat API makes it; the prompt has the words of its parts."""
    request = ChatCompletionRequest.model_validate(body)
    images: list[Any] = []
    clips: list[Any] = []
    sounds: list[Any] = []
    (message,) = (
        process_content_for_template_format(each.model_dump(), "openai", images, clips, sounds, [])
        for each in request.messages
    )
    assert not sounds
    kinds = [each["type"] for each in message["content"]]
    words = [f"<|vision_start|>{_WORDS[each]}<|vision_end|>" if each in _WORDS else "w5" for each in kinds]
    return GenerateReqInput(text=" ".join(words), image_data=images, video_data=clips)


async def test_the_receiver_gets_the_rows_of_clips_and_their_times(
    sglang: SGLang,
    adapter: Adapter,
    recorded: Json,
    embeddings: list[Embedding],
    vitwire: ServerProcess,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    picture, first, second = embeddings
    texts: list[str] = []
    encode = type(sglang.tokenizer).encode
    monkeypatch.setattr(
        type(sglang.tokenizer), "encode", lambda self, text, **more: texts.append(text) or encode(self, text, **more)
    )
    receiver = create_mm_receiver(sglang.server_args, transport_mode="http", encode_urls=[adapter.http])
    request = read(recorded)
    inputs = await receiver.recv_mm_data(request, sglang.processor, request.text)
    with Client(vitwire.target) as client:
        model = client.model()
    times = [model.group_seconds(each.report.frame_seconds) for each in (first, second)]
    assert texts == [request.text, *(f"<{each:.1f} seconds>" for clip in times for each in clip)]
    groups = [item for item in inputs.mm_items if item.modality == Modality.VIDEO]
    assert len(groups) == first.grid[0] + second.grid[0]
    found = torch.cat([each.precomputed_embeddings for each in groups])
    expected = torch.cat([first.torch(), second.torch()])
    torch.testing.assert_close(found, expected, rtol=0, atol=0.02)
    (image,) = (item for item in inputs.mm_items if item.modality == Modality.IMAGE)
    torch.testing.assert_close(image.precomputed_embeddings, picture.torch(), rtol=0, atol=0.02)
    ids = list(inputs.input_ids)
    for item in inputs.mm_items:
        ((start, end),) = item.offsets
        token = sglang.config.image_token_id if item is image else sglang.config.video_token_id
        assert ids[start : end + 1] == [token] * len(item.precomputed_embeddings)
    positions, _ = MRotaryEmbedding.get_rope_index(
        spatial_merge_size=2,
        image_token_id=sglang.config.image_token_id,
        video_token_id=sglang.config.video_token_id,
        vision_start_token_id=sglang.config.vision_start_token_id,
        model_type="qwen3_vl",
        input_ids=torch.tensor([ids]),
        image_grid_thw=torch.tensor([picture.grid]),
        video_grid_thw=torch.tensor([first.grid, second.grid]),
    )
    assert torch.equal(inputs.mrope_positions, positions.squeeze(1))


def test_intervals_of_clips_may_be_plain_numbers() -> None:
    """As the adapter sends them for Qwen2.5-VL; SGLang's encoder sends a tensor."""
    ids, grid = torch.tensor([[3, 502, *[501] * 12, 503]]), torch.tensor([[3, 4, 4]])
    common: Json = {
        "spatial_merge_size": 2, "image_token_id": 500, "video_token_id": 501, "vision_start_token_id": 502,
        "model_type": "qwen2_5_vl", "tokens_per_second": 2, "input_ids": ids, "video_grid_thw": grid,
    }  # fmt: skip
    plain, _ = MRotaryEmbedding.get_rope_index(**common, second_per_grid_ts=[0.5])
    tensor, _ = MRotaryEmbedding.get_rope_index(**common, second_per_grid_ts=torch.tensor([0.5]))
    default, _ = MRotaryEmbedding.get_rope_index(**common)
    assert torch.equal(plain, tensor)
    assert not torch.equal(plain, default)


async def test_a_bad_clip_fails_the_request_at_once(sglang: SGLang, adapter: Adapter, files: Sequence[bytes]) -> None:
    receiver = create_mm_receiver(sglang.server_args, transport_mode="http", encode_urls=[adapter.http])
    bad = _uri("video/mp4", files[1][: len(files[1]) // 2])
    request = GenerateReqInput(text="<|vision_start|><|video_pad|><|vision_end|>", video_data=[bad])
    assert await receiver.recv_mm_data(request, sglang.processor, request.text) is None
