"""`vitwire router` between the real openai client, a real server and a stand-in engine."""

import base64
import json
import re
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import matplotlib as mpl
import numpy as np
import openai
import pytest
import skimage
import torch
from openai import OpenAI
from PIL import Image

from checkpoints import Checkpoints
from encoded_files import saved
from engine import WORDS
from entered import entered
from metric_pages import durations
from routers import CHAT, EngineProcess, RouterProcess, client_of, decoded, leaving, router
from servers import ServerProcess, serving
from vitwire import Client, Item
from vitwire.integrations.vllm.settings import Settings
from waiting import until

DOCUMENT = Path(__file__).parents[2] / "docs" / "router.md"

HOPPER = Path(mpl.get_data_path()) / "sample_data" / "grace_hopper.jpg"
COFFEE = Path(skimage.__file__).parent / "data" / "coffee.png"
Json = dict[str, Any]

server = entered(lambda checkpoints: serving(checkpoints("qwen3_vl"), "--cache-bytes", "100000000"))
proxy = entered(lambda server, stand_in: router(server.target, stand_in.url))
llm = entered(client_of, scope="function")


def data_uri(file: Path | bytes) -> str:
    content = file if isinstance(file, bytes) else file.read_bytes()
    return "data:image/jpeg;base64," + base64.b64encode(content).decode()


def image(url: str, **fields: str) -> Json:
    return {"type": "image_url", "image_url": {"url": url, **fields}}


def text(words: str) -> Json:
    return {"type": "text", "text": words}


def user(*parts: Json) -> list[Any]:
    return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": list(parts)}]


def test_text_passes_as_it_is(llm: OpenAI, received: EngineProcess) -> None:
    answer = llm.chat.completions.create(
        model="tiny", messages=user(text("Hello")), temperature=0.5, extra_body={"unknown": [1.5, None]}
    )
    assert answer.choices[0].message.content == "".join(WORDS)
    (request,) = received.requests()
    assert request["body"] == {
        "model": "tiny", "messages": user(text("Hello")), "temperature": 0.5, "unknown": [1.5, None],
    }  # fmt: skip
    assert request["headers"]["authorization"] == "Bearer sk-caller"


def test_images_become_embeddings(llm: OpenAI, received: EngineProcess, server: ServerProcess) -> None:
    messages = user(
        text("Compare"), image(data_uri(HOPPER), detail="high"), text("with"), image(data_uri(COFFEE)),
        image(data_uri(HOPPER)) | {"cache_control": {"type": "ephemeral"}}, text("please"),
    )  # fmt: skip
    answer = llm.chat.completions.create(model="tiny", messages=messages, seed=7)
    assert answer.choices[0].message.content == "".join(WORDS)
    (request,) = received.requests()
    assert request["body"]["seed"] == 7
    assert request["body"]["messages"][0] == messages[0]
    parts = request["body"]["messages"][1]["content"]
    assert [part["type"] for part in parts] == ["text", "image_embeds", "text", "image_embeds", "image_embeds", "text"]
    assert [parts[0], parts[2], parts[5]] == [text("Compare"), text("with"), text("please")]
    assert parts[4] == parts[1] | {"cache_control": {"type": "ephemeral"}}
    with Client(server.target) as client:
        expected = client.encode_images([HOPPER, COFFEE])
    for part, embedding in zip((parts[1], parts[3]), expected, strict=True):
        rows = decoded(part["image_embeds"]["image_embeds"])
        assert torch.equal(rows, embedding.torch())
        assert decoded(part["image_embeds"]["image_grid_thw"]).tolist() == list(embedding.grid)
    assert parts[1]["uuid"] != parts[3]["uuid"]


@pytest.mark.parametrize("mode", ["inline", "reference"])
def test_options_of_images_are_the_encoders(
    server: ServerProcess, stand_in: EngineProcess, received: EngineProcess, mode: str
) -> None:
    """The engine gets rows of the grid that its processor would choose, and its own options with them."""
    messages, grids, ids = user(image(data_uri(COFFEE)), text("and"), image(data_uri(HOPPER))), [], set[str]()
    with router(server.target, stand_in.url, f"--mode={mode}") as proxy, Client(server.target) as client:
        for options in ({}, {"max_pixels": 128 * 128}, {"size": {"shortest_edge": 4096, "longest_edge": 16384}}):
            answer = httpx2.post(
                proxy.url + CHAT, json={"messages": messages, "mm_processor_kwargs": options}, timeout=60
            )
            assert answer.status_code == 200, answer.text
            body = received.requests()[-1]["body"]
            assert body["mm_processor_kwargs"] == options
            first, _, second = body["messages"][1]["content"]
            for part, file in ((first, COFFEE), (second, HOPPER)):
                (own,) = client.encode([Item.from_file(file, options=options)])
                grid = part["image_embeds"]["image_grid_thw"]
                assert tuple(grid if isinstance(grid, list) else decoded(grid).tolist()) == own.grid
                if mode == "inline":
                    torch.testing.assert_close(
                        decoded(part["image_embeds"]["image_embeds"]), own.torch(), rtol=0, atol=0.05
                    )
                else:
                    (stored,) = client.encode([Item(content_id=part["uuid"])])
                    assert stored.grid == own.grid
                grids.append(own.grid)
                ids.add(part["uuid"])
        count = len(received.requests())
        for wrong in ({"max_pixels": 0}, {"max_pixels": 9, "image_mean": [0, 0, 0]}, {"min_pixels": (1 << 63) - 1}):
            answer = httpx2.post(
                proxy.url + CHAT, json={"messages": messages, "mm_processor_kwargs": wrong}, timeout=60
            )
            assert answer.status_code == 400, answer.text
            assert ("min_pixels" if "min_pixels" in wrong else "mm_processor_kwargs") in answer.text
        assert len(received.requests()) == count
    assert (len(set(grids)), len(ids)) == (4, 6)


def test_a_stream_arrives_piece_by_piece(llm: OpenAI, stand_in: EngineProcess) -> None:
    messages = user(text("What is this?"), image(data_uri(COFFEE)))
    with llm.chat.completions.create(model="slow", messages=messages, stream=True) as stream:
        assert next(stream).choices[0].delta.content == WORDS[0]
        stand_in.test("continue")  # only now does the engine send the rest
        assert [chunk.choices[0].delta.content for chunk in stream] == WORDS[1:]


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("data:image/png;base64,!!!!", "invalid_base64"),
        ("data:image/png;base64,QUJD", "invalid_image"),
        ("data:image/svg+xml;base64,PHN2Zy8+", "invalid_image"),
        ("https://example.org/cat.jpg", "image_url_refused"),
        ("file:///etc/passwd", "image_url_refused"),
    ],
)
def test_bad_images_are_named(llm: OpenAI, received: EngineProcess, url: str, code: str) -> None:
    messages = user(text("t"), image(data_uri(HOPPER)), image(url))
    with pytest.raises(openai.BadRequestError) as caught:
        llm.chat.completions.create(model="tiny", messages=messages)
    assert (caught.value.code, caught.value.param) == (code, "messages[1].content[2].image_url")
    assert caught.value.type == "invalid_request_error"
    assert "0x" not in str(caught.value)
    assert received.requests() == []
    (block,) = re.findall(r"```python\n(import re\n.*?)```", DOCUMENT.read_text(), re.DOTALL)
    exec(block, space := {"client": llm})
    with pytest.raises(openai.BadRequestError):
        space["ask"](messages)
    assert space["ask"]([*messages, {"role": "assistant", "content": "?"}, *user(text("And now?"))[1:]]).choices
    sent = received.requests()[0]["body"]["messages"][1]["content"]
    assert [each["type"] for each in sent] == ["text", "image_embeds", "text"]


@pytest.mark.matrix
@pytest.mark.parametrize("mode", ["inline", "reference"])
def test_a_server_that_prepares_nothing(mode: str, checkpoints: Checkpoints, received: EngineProcess) -> None:
    """Also where the engine may encode what the encoder fails at: every image would fail."""
    flags = ("--graphs", "off", "--decode-processes", "0", "--cache-bytes", "1000000")
    with (
        serving(checkpoints("qwen3_vl"), *flags) as server,
        router(server.target, received.url, f"--mode={mode}", "--on-encoder-failure=engine") as proxy,
        client_of(proxy) as llm,
    ):
        with pytest.raises(openai.InternalServerError, match="--decode-processes") as caught:
            llm.chat.completions.create(model="tiny", messages=user(image(data_uri(HOPPER))))
        assert (caught.value.status_code, caught.value.code) == (502, "encoder_without_decoders")
    assert received.requests() == []


def test_a_truncated_image(llm: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="cannot be decoded: image file is truncated"):
        llm.chat.completions.create(model="tiny", messages=user(image(data_uri(COFFEE.read_bytes()[:5000]))))


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, openai.BadRequestError),
        (401, openai.AuthenticationError),
        (429, openai.RateLimitError),
        (503, openai.InternalServerError),
    ],
)
def test_errors_of_the_engine_pass(llm: OpenAI, status: int, kind: type[openai.APIStatusError]) -> None:
    with pytest.raises(kind, match=f"the engine says {status}") as caught:
        llm.chat.completions.create(model=f"status-{status}", messages=user(text("t"), image(data_uri(COFFEE))))
    assert caught.value.response.headers["retry-after"] == "7"


def test_other_routes_pass_as_they_are(llm: OpenAI, proxy: RouterProcess, received: EngineProcess) -> None:
    assert [each.id for each in llm.models.list()] == ["tiny"]
    body = bytes(range(256)) * 10
    headers = {
        "content-type": "application/x-any",
        "traceparent": "00-a-b-01",
        "tracestate": "v=1",
        "x-request-id": "mine-1",
    }
    answer = httpx2.put(f"{proxy.url}/v1/things/a%2Fb?x=1&y=%20", content=body, headers=headers)
    assert (answer.content, answer.headers["content-type"]) == (body, "application/x-any")
    assert answer.headers["x-request-id"] == "mine-1"
    _, request = received.requests()
    assert (request["method"], request["query"]) == ("PUT", "x=1&y=%20")
    assert {name: request["headers"][name] for name in headers} == headers
    for path in (
        "/reset_prefix_cache",
        "/v1/../reset_prefix_cache",
        "/v1/%2e%2e/test/sick",
        "/test/sick",
        "/v1/v1/messages",
    ):
        raw = httpx2.URL(proxy.url).copy_with(raw_path=path.encode())
        refused = httpx2.post(raw, timeout=60)
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "unknown_path")
    assert httpx2.get(proxy.url + CHAT, timeout=60).status_code == 405
    assert received.requests() == []


def test_every_answer_has_a_request_id(llm: OpenAI, received: EngineProcess) -> None:
    messages = user(image(data_uri(COFFEE)))
    answer = llm.chat.completions.with_raw_response.create(model="tiny", messages=messages)
    assert answer.headers["x-engine"] == "stand-in"
    given = answer.headers["x-request-id"]
    assert received.requests()[0]["headers"]["x-request-id"] == given
    assert len(given) == 32
    with pytest.raises(openai.BadRequestError) as caught:
        llm.chat.completions.create(
            model="tiny", messages=user(image("data:x")), extra_headers={"x-request-id": "mine-2"}
        )
    assert caught.value.request_id == "mine-2"


def test_an_image_in_many_places_is_sent_within_a_limit(server: ServerProcess, received: EngineProcess) -> None:
    place = image(data_uri(saved(Image.new("RGB", (448, 448)))))
    with (
        router(server.target, received.url, "--max-buffered-bytes", str(4 << 20)) as process,
        client_of(process) as llm,
    ):
        with pytest.raises(openai.APIStatusError) as caught:
            llm.chat.completions.create(model="tiny", messages=user(*[place] * 60))
        assert (caught.value.status_code, caught.value.code) == (413, "request_too_large")
        assert not received.requests()
        llm.chat.completions.create(model="tiny", messages=user(*[place] * 4))
        (request,) = received.requests()
        assert 60 / 4 * len(json.dumps(request["body"])) > 4 << 20


def test_health_and_metrics(proxy: RouterProcess) -> None:
    for path in ("/health", "/healthz", "/livez"):
        assert proxy.page(path)[0] == 200
    assert proxy.metric("vitwire_router_requests_total", route="chat", code="200") >= 1
    assert proxy.metric("vitwire_router_images_total", source="data", result="loaded") >= 1
    assert proxy.metric("vitwire_router_inflight_requests") == 0
    assert proxy.metric("vitwire_router_buffered_bytes") == 0
    assert durations(proxy.page("/metrics")[1]) == {"vitwire_router_stage_seconds"}


def test_a_client_that_leaves_cancels_the_engine(proxy: RouterProcess, stand_in: EngineProcess) -> None:
    cancelled = stand_in.test("state")["cancelled"]
    before = proxy.metric("vitwire_router_cancelled_total", stage="response")
    with leaving(proxy, {"model": "slow", "stream": True, "messages": user(text("t"))}) as sock:
        assert sock.recv(100).startswith(b"HTTP/1.1 200")
    until(lambda: stand_in.test("state")["cancelled"] == cancelled + 1)
    until(lambda: proxy.metric("vitwire_router_cancelled_total", stage="response") == before + 1)
    until(lambda: proxy.metric("vitwire_router_inflight_requests") == 0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_drain(number: signal.Signals, server: ServerProcess, stand_in: EngineProcess) -> None:
    with router(server.target, stand_in.url, "--lame-duck-seconds=1") as proxy, client_of(proxy) as llm:
        with llm.chat.completions.create(model="slow", messages=user(image(data_uri(COFFEE))), stream=True) as stream:
            assert next(stream).choices
            proxy.process.send_signal(number)
            until(lambda: proxy.page("/health")[0] == 503)
            assert json.loads(proxy.page("/health")[1])["status"] == "draining"
            assert llm.chat.completions.create(model="tiny", messages=user(text("t"))).choices, (
                "a lame duck still serves"
            )
            until(lambda: not accepts(proxy))
            stand_in.test("continue")
            assert len(list(stream)) == len(WORDS) - 1
        assert proxy.process.wait(30) == 0
        assert "Traceback" not in proxy.log()


def accepts(proxy: RouterProcess) -> bool:
    try:
        socket.create_connection(("127.0.0.1", proxy.port), timeout=5).close()
    except OSError:
        return False
    return True


@pytest.mark.matrix
def test_references_are_found_on_the_replica_that_has_them(
    checkpoints: Checkpoints, server: ServerProcess, received: EngineProcess
) -> None:
    """The engine gets metadata only; the connector's client asks two replicas as the router did."""
    images = [Image.new("RGB", (64, 64), (shade, 0, 0)) for shade in range(0, 240, 30)]
    with serving(checkpoints("qwen3_vl"), "--cache-bytes", "100000000") as other:
        target = f"ipv4:127.0.0.1:{server.port},127.0.0.1:{other.port}"
        held = [each.metric("vitwire_cache_misses_total") for each in (server, other)]
        with router(target, received.url, "--mode", "reference") as process, client_of(process) as llm:
            content = user(*(image(data_uri(saved(each, "PNG"))) for each in images))
            llm.chat.completions.create(model="m", messages=content)
        parts = received.requests()[-1]["body"]["messages"][1]["content"]
        with Settings.of({"target": target}).client(None) as client:
            for part in parts:
                (grid,) = part["image_embeds"].values()
                (embedding,) = client.encode([Item(None, tuple(grid), content_id=part["uuid"])])
                assert embedding.report.path == "cache"
        encoded = [
            each.metric("vitwire_items_total", path="eager") > 0 and each.metric("vitwire_cache_misses_total") > before
            for each, before in zip((server, other), held, strict=True)
        ]
    assert all(encoded), "both replicas encoded some of the images"


@pytest.mark.matrix
def test_reference_to_a_server_without_a_cache(checkpoints: Checkpoints, received: EngineProcess) -> None:
    """The engine would find no embedding: the caller gets the reason, and the engine no request."""
    with (
        serving(checkpoints("qwen3_vl"), "--graphs", "off") as server,
        router(server.target, received.url, "--mode=reference") as proxy,
        client_of(proxy) as llm,
    ):
        for _ in range(2):
            with pytest.raises(openai.InternalServerError, match="--cache-bytes") as caught:
                llm.chat.completions.create(model="tiny", messages=user(image(data_uri(HOPPER))))
            assert (caught.value.status_code, caught.value.code) == (502, "encoder_without_cache")
        status, text = proxy.page("/health")
        assert (status, json.loads(text)["status"]) == (503, "not ready")
        assert "--cache-bytes" in json.loads(text)["encoder"]
    assert received.requests() == []


@pytest.mark.matrix
def test_many_at_a_time(proxy: RouterProcess, received: EngineProcess, server: ServerProcess) -> None:
    """Every request gets its own images, in their order."""
    rng = np.random.default_rng(0)
    pictures = [rng.integers(0, 255, (48 + 16 * each, 64, 3), np.uint8) for each in range(6)]
    urls = [data_uri(saved(Image.fromarray(each), "PNG")) for each in pictures]
    with Client(server.target) as client:
        expected = [each.torch() for each in client.encode_images(pictures)]

    def ask(number: int) -> None:
        chosen = [image(urls[each % 6]) for each in range(number, number + 4)]
        with client_of(proxy) as llm:
            assert llm.chat.completions.create(model="tiny", messages=user(*chosen), seed=number).choices

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(24)))
    requests = received.requests()
    assert len(requests) == 24
    for request in requests:
        number, parts = request["body"]["seed"], request["body"]["messages"][1]["content"]
        for position, part in enumerate(parts):
            assert torch.equal(decoded(part["image_embeds"]["image_embeds"]), expected[(number + position) % 6])
