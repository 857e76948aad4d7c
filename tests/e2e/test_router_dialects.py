"""Images in /v1/responses and /v1/messages, sent by the real clients of both APIs."""

import base64
import io
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import openai
import pytest
import skimage
import torch
from anthropic import Anthropic
from openai import OpenAI

from checkpoints import Checkpoints
from engine import WORDS
from routers import EngineProcess, RouterProcess, client_of, picture, router, until
from servers import ServerProcess, serving
from vitwire import Client

Json = dict[str, Any]
COFFEE = Path(skimage.__file__).parent / "data" / "coffee.png"
TEXT = "".join(WORDS)
DATA = base64.b64encode(COFFEE.read_bytes()).decode()
URI = f"data:image/png;base64,{DATA}"
SOURCE: Any = {"type": "base64", "media_type": "image/png", "data": DATA}
BLOCK: Any = {"type": "image", "source": SOURCE}
IMAGE: Any = {"type": "input_image", "image_url": URI, "detail": "high"}
QUESTION: Any = {"type": "input_text", "text": "What is this?"}
TOOL: Any = {"name": "look", "description": "Looks", "input_schema": {"type": "object", "properties": {}}}
RESPONSES, MESSAGES, CHAT = "/v1/responses", "/v1/messages", "/v1/chat/completions"
MODES = {"inline": (), "reference": ("--mode", "reference"), "sglang": ("--engine", "sglang")}


@pytest.fixture(scope="module")
def server(checkpoints: Checkpoints) -> Iterator[ServerProcess]:
    with serving(checkpoints("qwen3_vl"), "--cache-bytes", "100000000") as process:
        yield process


@pytest.fixture(scope="module")
def proxies(server: ServerProcess, stand_in: EngineProcess) -> Iterator[dict[str, RouterProcess]]:
    with ExitStack() as stack:
        yield {mode: stack.enter_context(router(server.target, stand_in.url, *flags)) for mode, flags in MODES.items()}


@pytest.fixture
def gpt(proxies: dict[str, RouterProcess]) -> Iterator[OpenAI]:
    with client_of(proxies["inline"]) as client:
        yield client


def claude_of(proxy: RouterProcess, key: str = "sk-caller") -> Anthropic:
    return Anthropic(base_url=proxy.url, api_key=key, max_retries=0, timeout=60)


@pytest.fixture
def claude(proxies: dict[str, RouterProcess]) -> Iterator[Anthropic]:
    with claude_of(proxies["inline"]) as client:
        yield client


def user(*parts: Any) -> list[Any]:
    return [{"role": "user", "content": list(parts)}]


def decoded(value: str) -> torch.Tensor:
    tensor: torch.Tensor = torch.load(io.BytesIO(base64.b64decode(value)), weights_only=True)
    return tensor


def check_embedding(part: Json, server: ServerProcess) -> None:
    """The part carries the embedding of the photograph."""
    with Client(server.target) as client:
        (expected,) = client.encode_images([COFFEE])
    assert torch.equal(decoded(part["image_embeds"]["image_embeds"]), expected.torch())
    assert decoded(part["image_embeds"]["image_grid_thw"]).tolist() == list(expected.grid)
    assert part["uuid"]


def test_responses_with_embeddings(gpt: OpenAI, received: EngineProcess, server: ServerProcess) -> None:
    call: Any = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    output: Any = {"type": "function_call_output", "call_id": "c", "output": [IMAGE]}
    answer = gpt.responses.create(
        model="tiny", input=[*user(QUESTION, IMAGE), call, output], instructions="Be brief.", extra_body={"x": [1]}
    )
    assert answer.output_text == TEXT
    (request,) = received.requests()
    body = request["body"]
    assert (request["path"], body["instructions"], body["x"], body["input"][1]) == (RESPONSES, "Be brief.", [1], call)
    assert body["input"][0]["content"][0] == QUESTION
    part = body["input"][0]["content"][1]
    assert part == body["input"][2]["output"][0]
    assert (part["type"], part["detail"], "image_url" in part) == ("input_image", "high", False)
    check_embedding(part, server)


def test_responses_are_streamed(gpt: OpenAI) -> None:
    with gpt.responses.stream(model="tiny", input=user(QUESTION, IMAGE)) as stream:
        words = [event.delta for event in stream if event.type == "response.output_text.delta"]
    assert words == WORDS
    assert stream.get_final_response().output_text == TEXT


def test_messages_with_embeddings(claude: Anthropic, received: EngineProcess, server: ServerProcess) -> None:
    use: Any = {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": "table"}}
    result: Any = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "Seen"}, BLOCK]}
    conversation: list[Any] = [
        *user({"type": "text", "text": "What is this?"}, BLOCK),
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm", "signature": "s"}, use]},
        *user(result),
    ]
    message = claude.messages.create(
        model="tiny", max_tokens=50, messages=conversation, system="Be brief.", stop_sequences=["END"],
        tools=[TOOL], tool_choice={"type": "any"}, metadata={"user_id": "u"},
        extra_body={"temperature": 0.5, "top_k": 3},
    )  # fmt: skip
    assert (message.content[0].text, message.stop_reason) == (TEXT, "end_turn")
    assert (message.usage.input_tokens, message.usage.output_tokens) == (20, 5)
    (request,) = received.requests()
    body = request["body"]
    assert request["raw_target"] == CHAT + "?"
    embedded = body["messages"][1]["content"][1]
    check_embedding(embedded, server)
    assert body == {
        "model": "tiny", "max_tokens": 50, "max_completion_tokens": 50, "temperature": 0.5, "top_k": 3, "stop": ["END"],
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "What is this?"}, embedded]},
            {
                "role": "assistant",
                "reasoning": "Hm",
                "tool_calls": [
                    {"id": "t1", "type": "function", "function": {"name": "look", "arguments": '{"at": "table"}'}}
                ],
            },
            {"role": "tool", "tool_call_id": "t1", "content": "Seen"},
            {"role": "user", "content": [embedded]},
        ],
        "tools": [
            {
                "type": "function",
                "function": {"name": "look", "description": "Looks", "parameters": TOOL["input_schema"]},
            }
        ],
        "tool_choice": "required", "parallel_tool_calls": True,
    }  # fmt: skip


def test_messages_with_tools(claude: Anthropic) -> None:
    message = claude.messages.create(model="tool", max_tokens=50, messages=user(BLOCK), tools=[TOOL])
    (block,) = message.content
    assert (block.type, block.id, block.name, block.input) == ("tool_use", "call-1", "look", {"at": "sofa"})
    assert message.stop_reason == "tool_use"
    with claude.messages.stream(model="tool", max_tokens=50, messages=user(BLOCK), tools=[TOOL]) as stream:
        final = stream.get_final_message()
    assert [each.type for each in final.content] == ["text", "tool_use"]
    assert (final.content[1].input, final.stop_reason) == ({"at": "sofa"}, "tool_use")


def test_messages_are_streamed_piece_by_piece(
    claude: Anthropic, proxies: dict[str, RouterProcess], stand_in: EngineProcess
) -> None:
    with claude.messages.stream(model="slow", max_tokens=50, messages=user(BLOCK)) as stream:
        words = iter(stream.text_stream)
        assert next(words) == WORDS[0]
        stand_in.test("continue")  # only now does the engine send the rest
        assert list(words) == WORDS[1:]
        message = stream.get_final_message()
    assert (message.content[0].text, message.stop_reason, message.usage.input_tokens) == (TEXT, "end_turn", 20)
    cancelled = stand_in.test("cancelled")["cancelled"]
    with claude.messages.stream(model="slow", max_tokens=50, messages=user(BLOCK)) as stream:
        assert next(iter(stream.text_stream)) == WORDS[0]
    until(lambda: stand_in.test("cancelled")["cancelled"] == cancelled + 1)  # as the client has left
    proxy = proxies["inline"]
    assert proxy.metric("vitwire_router_requests_total", route="messages", code="200") >= 2
    until(lambda: proxy.metric("vitwire_router_cancelled_total", stage="response") >= 1)


@pytest.mark.parametrize("is_stream", [False, True])
def test_references(
    proxies: dict[str, RouterProcess], received: EngineProcess, server: ServerProcess, is_stream: bool
) -> None:
    """The engine fetches the embeddings by the references in its chat request."""
    with claude_of(proxies["reference"]) as claude:
        model = f"rows-from-{server.target}"
        if is_stream:
            with claude.messages.stream(model=model, max_tokens=50, messages=user(BLOCK)) as stream:
                assert stream.get_final_text() == TEXT
        else:
            assert claude.messages.create(model=model, max_tokens=50, messages=user(BLOCK)).content[0].text == TEXT
    with client_of(proxies["reference"]) as gpt:
        assert gpt.responses.create(model="tiny", input=user(IMAGE)).output_text == TEXT
    chat, response = received.requests()
    part = chat["body"]["messages"][0]["content"][0]
    assert list(part["image_embeds"]) == ["image_grid_thw"]
    assert response["body"]["input"][0]["content"] == [part | {"type": "input_image", "detail": "high"}]


def test_sglang_gets_checked_images(proxies: dict[str, RouterProcess], received: EngineProcess) -> None:
    block = {"type": "image", "source": SOURCE | {"media_type": "image/jpeg"}, "cache_control": {"type": "ephemeral"}}
    result: Any = {"type": "tool_result", "tool_use_id": "t1", "content": [block]}
    with claude_of(proxies["sglang"]) as claude:
        message = claude.messages.create(model="tiny", max_tokens=50, messages=user(result, block))
        assert message.content[0].text == TEXT
        with claude.messages.stream(model="tiny", max_tokens=50, messages=user(block)) as stream:
            assert list(stream.text_stream) == WORDS
    with client_of(proxies["sglang"]) as gpt:
        assert gpt.responses.create(model="tiny", input=user(QUESTION, IMAGE)).output_text == TEXT
    first, _, response = received.requests()
    checked = block | {"source": SOURCE}  # with the type that the file has
    assert first["path"] == MESSAGES
    assert first["body"]["messages"] == user(result | {"content": [checked]}, checked)
    assert response["body"] == {"model": "tiny", "input": user(QUESTION, IMAGE)}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
def test_without_images_nothing_changes(
    proxies: dict[str, RouterProcess], received: EngineProcess, path: str, mode: str
) -> None:
    name = "input" if path == RESPONSES else "messages"
    body = f'{{"model": "tiny",\n "{name}": [{{"role": "user", "content": "Hi"}}], "unknown":1.50}}'
    answer = httpx2.post(f"{proxies[mode].url}{path}?beta=true", content=body, timeout=60)
    assert answer.status_code == 200, answer.text
    (request,) = received.requests()
    assert (request["raw"], request["path"], request["query"]) == (body, path, "beta=true")


def test_errors_of_images(claude: Anthropic, gpt: OpenAI, received: EngineProcess) -> None:
    broken = base64.b64encode(b"no image").decode()
    source = SOURCE | {"data": broken}
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\].content\[1\].source: not a JPEG") as caught:
        claude.messages.create(model="tiny", max_tokens=9, messages=user(BLOCK, BLOCK | {"source": source}))
    assert (caught.value.body["type"], caught.value.body["error"]["type"]) == ("error", "invalid_request_error")
    with pytest.raises(anthropic.BadRequestError, match=r"base64"):
        claude.messages.create(model="tiny", max_tokens=9, messages=user(BLOCK | {"source": SOURCE | {"data": "?"}}))
    url: Any = BLOCK | {"source": {"type": "url", "url": "https://example.com/cat.png"}}
    with pytest.raises(anthropic.BadRequestError, match=r"fetches no URLs"):
        claude.messages.create(model="tiny", max_tokens=9, messages=user(url))
    with pytest.raises(anthropic.BadRequestError, match=r"^.*container: with images in the request, this field"):
        claude.messages.create(model="tiny", max_tokens=9, messages=user(BLOCK), extra_body={"container": "c"})
    with pytest.raises(openai.BadRequestError) as refused:
        gpt.responses.create(model="tiny", input=user(IMAGE | {"image_url": f"data:image/png;base64,{broken}"}))
    assert (refused.value.code, refused.value.param) == ("invalid_image", "input[0].content[0].image_url")
    with pytest.raises(openai.BadRequestError, match="vllm takes no image here"):
        gpt.responses.create(model="tiny", input=[{"role": "developer", "content": [IMAGE]}])
    with pytest.raises(openai.BadRequestError, match="files by id"):
        gpt.responses.create(model="tiny", input=user({"type": "input_image", "file_id": "f", "detail": "auto"}))
    assert received.requests() == []


def test_sglang_drops_images_of_tools_so_they_are_refused(proxies: dict[str, RouterProcess]) -> None:
    output: Any = {"type": "function_call_output", "call_id": "c", "output": [IMAGE]}
    with client_of(proxies["sglang"]) as gpt, pytest.raises(openai.BadRequestError, match="sglang takes no image here"):
        gpt.responses.create(model="tiny", input=[output])


def test_errors_of_the_engine(claude: Anthropic) -> None:
    with pytest.raises(anthropic.RateLimitError, match="the engine says 429") as limited:
        claude.messages.create(model="status-429", max_tokens=9, messages=user(BLOCK))
    assert limited.value.response.headers["retry-after"] == "7"
    assert limited.value.body["error"]["type"] == "rate_limit_error"
    with pytest.raises(anthropic.InternalServerError, match="closed the connection"):
        claude.messages.create(model="broken", max_tokens=9, messages=user(BLOCK))
    with pytest.raises(anthropic.InternalServerError, match="answer exceeds the limit of"):
        claude.messages.create(model="flood", max_tokens=9, messages=user(BLOCK))
    with (
        pytest.raises(anthropic.APIStatusError, match="closed the connection"),
        claude.messages.stream(model="broken-stream", max_tokens=9, messages=user(BLOCK)) as stream,
    ):
        stream.get_final_message()
    with (  # not translated
        pytest.raises(anthropic.APIStatusError, match="closed the connection"),
        claude.messages.stream(model="broken-stream", max_tokens=9, messages=user()) as stream,
    ):
        stream.get_final_message()


def test_streams_in_unusual_forms(claude: Anthropic) -> None:
    """The translation of a stream has another length, and cannot be read from a compressed one."""
    with claude.messages.stream(model="measured", max_tokens=9, messages=user(BLOCK)) as stream:
        assert stream.get_final_text() == TEXT
    with (
        pytest.raises(anthropic.InternalServerError, match="compressed its answer"),
        claude.messages.stream(model="compressed", max_tokens=9, messages=user(BLOCK)) as stream,
    ):
        stream.get_final_message()


def test_an_answer_of_many_values(claude: Anthropic, proxies: dict[str, RouterProcess]) -> None:
    """Others are served while it is read."""
    with ThreadPoolExecutor(1) as pool:
        began = time.monotonic()
        asked = pool.submit(claude.messages.create, model="many-values", max_tokens=9, messages=user(BLOCK))
        waits = [0.0]
        while not asked.done():
            before = time.monotonic()
            assert proxies["inline"].page("/livez")[0] == 200
            waits.append(time.monotonic() - before)
        with pytest.raises(anthropic.InternalServerError, match="cannot be translated"):
            asked.result()
    assert max(waits) < (time.monotonic() - began) / 3


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
def test_errors_have_the_form_of_the_api(proxies: dict[str, RouterProcess], path: str) -> None:
    url = proxies["inline"].url + path
    requests: list[tuple[int, Json]] = [
        (400, {"content": b"{"}),
        (400, {"content": b'{"input": ' + b"[" * 100_000}),
        (400, {"content": json.dumps({"input": user(IMAGE | {"image_url": 1}), "messages": user(BLOCK)}).encode()}),
        (400, {"data": {"cup": "x"}, "files": {"cup": b"x"}}),
        (415, {"content": b"{}", "headers": {"content-encoding": "gzip"}}),
        (431, {"content": b"{}", "headers": {"x-long": "x" * 40_000}}),
    ]
    for answer, status in [
        *((httpx2.post(url, timeout=60, **each), code) for code, each in requests),
        (httpx2.get(url, timeout=60), 405),
    ]:
        body = answer.json()
        assert (answer.status_code, bool(body["error"]["message"])) == (status, True), answer.text
        assert (body.get("type") == "error", "code" in body["error"]) == (path == MESSAGES, path == RESPONSES)


def test_keys(server: ServerProcess, received: EngineProcess, tmp_path: Path) -> None:
    keys, engine_key = tmp_path / "keys", tmp_path / "engine"
    keys.write_text("secret\n")
    engine_key.write_text("of-the-engine\n")
    flags = ("--api-keys-file", str(keys), "--engine-api-key-file", str(engine_key))
    with router(server.target, received.url, *flags) as proxy:
        with claude_of(proxy, "secret") as claude:
            claude.messages.create(model="tiny", max_tokens=9, messages=user(BLOCK))
            claude.messages.create(model="tiny", max_tokens=9, messages=[{"role": "user", "content": "Hi"}])
            claude.messages.count_tokens(model="tiny", messages=[{"role": "user", "content": "Hi"}])
        for request in received.requests():
            assert request["headers"]["authorization"] == "Bearer of-the-engine"
            assert "x-api-key" not in request["headers"]
        with claude_of(proxy, "wrong") as claude, pytest.raises(anthropic.AuthenticationError) as caught:
            claude.messages.create(model="tiny", max_tokens=9, messages=user(BLOCK))
        assert caught.value.body["error"]["type"] == "authentication_error"
        assert "send x-api-key: KEY" in caught.value.body["error"]["message"]
        refused = httpx2.post(proxy.url + CHAT, headers={"x-api-key": "secret"}, content=b"{}", timeout=60)
        assert "send Authorization: Bearer KEY" in refused.text
        assert refused.status_code == 401


def test_the_engine_encodes_if_the_encoder_fails(received: EngineProcess) -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        dead = f"127.0.0.1:{nobody.getsockname()[1]}"
    flags = ("--on-encoder-failure", "engine", "--encoder-retries", "0")
    with router(dead, received.url, *flags) as proxy, client_of(proxy) as gpt, claude_of(proxy) as claude:
        assert gpt.responses.create(model="tiny", input=user(IMAGE)).output_text == TEXT
        message = claude.messages.create(model="tiny", max_tokens=9, messages=user(BLOCK))
        assert message.content[0].text == TEXT
    response, chat = received.requests()
    assert response["body"]["input"] == user(IMAGE)
    assert chat["body"]["messages"] == user({"type": "image_url", "image_url": {"url": URI}})


def test_uploads(proxies: dict[str, RouterProcess], received: EngineProcess, server: ServerProcess) -> None:
    source = {"type": "url", "url": "upload:cup"}
    request = {"model": "tiny", "max_tokens": 9, "messages": user({"type": "image", "source": source})}
    files = {"request": (None, json.dumps(request)), "cup": ("cup.png", COFFEE.read_bytes())}
    answer = httpx2.post(proxies["inline"].url + MESSAGES, files=files, timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.json()["content"][0]["text"] == TEXT
    (chat,) = received.requests()
    check_embedding(chat["body"]["messages"][0]["content"][0], server)


def test_large_requests_are_translated_in_a_worker(claude: Anthropic, received: EngineProcess) -> None:
    data = picture(400, 400, 1).partition(",")[2]
    assert len(data) > 64 << 10
    image = BLOCK | {"source": SOURCE | {"data": data}}
    with claude.messages.stream(model="tiny", max_tokens=9, messages=user(image, BLOCK, image)) as stream:
        assert stream.get_final_text() == TEXT
    (chat,) = received.requests()
    first, second, third = chat["body"]["messages"][0]["content"]
    assert first == third != second
