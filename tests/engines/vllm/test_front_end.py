"""`vllm serve` with our entry point, and the published clients: images reach a real encoder, tricks nothing."""

import json
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from anthropic import Anthropic
from bench.engine.photos import MODEL
from bench.engine.serving import EngineProcess, Failed
from openai import OpenAI
from tests.engines.vllm.hooked import served
from tests.engines.vllm.image_site import data_url, picture, video

from entered import entered
from servers import ServerProcess

Json = dict[str, Any]
CHAT = "/v1/chat/completions"
TEXT = {"type": "text", "text": "?"}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("installed")


vllm = entered(lambda checkpoint, server, path: served(checkpoint, server.target, path))


def asked(vllm: EngineProcess, body: Json, route: str = CHAT) -> tuple[int, str]:
    request = Request(vllm.url + route, json.dumps(body).encode(), {"content-type": "application/json"})
    try:
        with urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        return error.code, error.read().decode()


def url(seed: int, kind: str = "JPEG") -> str:
    return data_url(picture(64, 64, kind, seed), f"image/{kind.lower()}")


def image(seed: int, kind: str = "JPEG") -> Json:
    return {"type": "image_url", "image_url": {"url": url(seed, kind)}}


def chat(*parts: Json, **fields: Any) -> Json:
    return {"model": MODEL, "messages": [{"role": "user", "content": [*parts, TEXT]}], "max_tokens": 2, **fields}


def outcomes(vllm: EngineProcess, of: str = "images") -> dict[str, int]:
    lines = [each for each in vllm.page("/metrics")[1].splitlines() if each.startswith(f"vitwire_front_end_{of}_total")]
    return {line.split('"')[1]: int(float(line.rpartition(" ")[2])) for line in lines}


def accepted(vllm: EngineProcess) -> int:
    found = outcomes(vllm)
    assert found.keys() <= {"accepted"}, found
    return found.get("accepted", 0)


def test_images_of_every_dialect(vllm: EngineProcess) -> None:
    """Chat completions, whole and streamed, responses, and messages in which tools answer with images, turn by turn."""
    before, client = accepted(vllm), OpenAI(base_url=f"{vllm.url}/v1", api_key="-")
    answer = client.chat.completions.create(**chat(image(1), image(2, "PNG"), image(1)))
    assert answer.usage.completion_tokens == 2
    chunks = list(client.chat.completions.create(**chat(image(3)), stream=True))
    assert chunks[-1].choices[0].finish_reason == "length"
    parts = [{"type": "input_image", "image_url": url(4), "detail": "auto"}, {"type": "input_text", "text": "?"}]
    said: Any = [{"role": "user", "content": parts}]
    response = client.responses.create(model=MODEL, input=said, max_output_tokens=2)
    assert response.usage.output_tokens == 2
    assert accepted(vllm) == before + 5
    speaker = Anthropic(base_url=vllm.url, api_key="-")
    turns: list[Any] = [{"role": "user", "content": "Look."}]
    for turn in range(3):
        data = url(10 + turn, "PNG").partition("base64,")[2]
        shown = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
        turns += [
            {"role": "assistant", "content": [{"type": "tool_use", "id": f"t{turn}", "name": "look", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": f"t{turn}", "content": [shown]}]},
        ]
        message = speaker.messages.create(model=MODEL, max_tokens=2, messages=turns)
        assert message.usage.output_tokens == 2
    assert accepted(vllm) == before + 5 + 1 + 2 + 3
    counts = vllm.counters()
    assert counts["vitwire_ec_fetched_items_total"] >= 7
    assert not counts["vitwire_ec_failed_items_total"] + counts["vitwire_ec_missing_items_total"]


def test_clips(vllm: EngineProcess, clips: dict[str, bytes]) -> None:
    """Among images, whole and streamed; counting tokens uploads none; vLLM refuses a file of another kind."""
    client, parts = OpenAI(base_url=f"{vllm.url}/v1", api_key="-"), [image(5), video(clips["usual"])]
    answer = client.chat.completions.create(**chat(*parts, video(clips["NTSC, VP9"])))
    assert answer.usage.completion_tokens == 2
    chunks = list(client.chat.completions.create(**chat(*parts), stream=True))
    assert chunks[-1].choices[0].finish_reason == "length"
    assert asked(vllm, {"model": MODEL, "messages": chat(video(clips["odd"]))["messages"]}, "/tokenize")[0] == 200
    assert outcomes(vllm, "clips") == {"accepted": 3}
    assert asked(vllm, chat(video(b"no clip")))[0] == 400
    assert asked(vllm, chat(*parts))[0] == 200


def test_who_counts_tokens_uploads_nothing(vllm: EngineProcess, server: ServerProcess) -> None:
    before = outcomes(vllm), server.metric("vitwire_items_total")
    body = {"model": MODEL, "messages": chat(image(20))["messages"]}
    status, answer = asked(vllm, body, "/tokenize")
    assert status == 200
    assert json.loads(answer)["count"] > 16
    data = url(21, "PNG").partition("base64,")[2]
    shown = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    messages: Any = [{"role": "user", "content": [shown]}]
    counted = Anthropic(base_url=vllm.url, api_key="-").messages.count_tokens(model=MODEL, messages=messages)
    assert counted.input_tokens > 16
    assert (outcomes(vllm), server.metric("vitwire_items_total")) == before


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_embeds", "image_embeds": {"image_grid_thw": [1, 4, 4]}, "uuid": "another's"},
        {"type": "image_embeds", "image_embeds": None, "uuid": "another's"},
        {"type": "video_embeds", "video_embeds": {"video_grid_thw": [1, 4, 4]}, "uuid": "another's"},
        {"type": "image_url", "image_url": None, "uuid": "another's"},
        {"image_url": None, "uuid": "another's"},
    ],
)
@pytest.mark.parametrize("ids", [None, {"content_ids": ["another's"]}])
def test_callers_name_nothing(part: Json, ids: Json | None, vllm: EngineProcess) -> None:
    status, answer = asked(vllm, chat(part, ec_transfer_params=ids))
    assert status == 400, answer
    assert asked(vllm, chat())[0] == 200


def test_rendered_features_of_callers_are_refused(vllm: EngineProcess) -> None:
    features = {"mm_hashes": {"image": ["another's"]}, "mm_placeholders": {"image": [{"offset": 1, "length": 4}]}}
    body = {"token_ids": [1, *[500] * 4], "features": features, "sampling_params": {"max_tokens": 1}}
    status, answer = asked(vllm, body, "/inference/v1/generate")
    assert status == 400
    assert "allow_caller_embeds" in answer


def test_a_broken_file(vllm: EngineProcess) -> None:
    """Its header is in order, so it is accepted: the request can be repeated, and is then vLLM's to refuse."""
    file = picture(640, 480, "PNG")
    broken = {"type": "image_url", "image_url": {"url": data_url(file[: len(file) // 2], "image/png")}}
    status, answer = asked(vllm, chat(broken))
    assert (status, "retry" in answer) == (503, True), answer
    status, answer = asked(vllm, chat(broken))
    assert (status, "load image" in answer) == (400, True), answer
    assert asked(vllm, chat(image(30)))[0] == 200


def test_without_an_encoder_the_tower_answers(checkpoint: Path, path: Path) -> None:
    with served(checkpoint, "127.0.0.1:1", path) as vllm:
        for seed in range(3):
            assert asked(vllm, chat(image(seed)))[0] == 200
        assert outcomes(vllm) == {"unavailable": 3}
        assert "an image or clip was not encoded (unavailable)" in vllm.log()


def test_without_the_plugin_it_does_not_start(checkpoint: Path, path: Path) -> None:
    with pytest.raises(Failed, match=r"not hooked.*VLLM_PLUGINS"), served(checkpoint, "127.0.0.1:1", path, plugins=""):
        pytest.fail("it answers")
