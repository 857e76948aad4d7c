"""`vitwire router` at its limits, and when clients, engine or encoder fail. The encoder is a fake one."""

import http.client
import json
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import grpc
import httpx2
import numpy as np
import openai
import psutil
import pytest
from grpc_health.v1 import health_pb2
from openai import OpenAI

from entered import entered
from fake_service import Fake, Running, abort, retry_info, serving
from routers import CHAT, EngineProcess, RouterProcess, client_of, leaving, picture, router, user
from waiting import until

pytestmark = pytest.mark.matrix

LIMITS = (
    "--max-body-bytes=400000", "--max-images=2", "--max-image-bytes=200000", "--max-image-pixels=10000",
    "--max-requests=3", "--max-header-bytes=4096", "--body-seconds=1", "--engine-seconds=2", "--stall-seconds=1",
    "--encoder-retries=0",
)  # fmt: skip
DEAD = "127.0.0.1:1"

encoder = entered(lambda: serving(Fake()))


@pytest.fixture
def fake(encoder: Running) -> Iterator[Fake]:
    """The encoder's service, for tests to change."""
    yield encoder.fake
    encoder.fake.before = lambda context: None
    encoder.fake.cancelled.clear()


proxy = entered(lambda encoder, stand_in: router(encoder.target, stand_in.url, *LIMITS))
llm = entered(client_of, scope="function")


def request_body(model: str, *urls: str, **fields: Any) -> dict[str, Any]:
    return {"model": model, "messages": user(*urls), **fields}


def failing(code: grpc.StatusCode, *details: Any) -> Callable[[grpc.ServicerContext], None]:
    return lambda context: abort(context, code, *details)


@pytest.mark.parametrize(
    ("code", "status", "name"),
    [
        (grpc.StatusCode.RESOURCE_EXHAUSTED, 429, "encoder_overloaded"),
        (grpc.StatusCode.UNAVAILABLE, 503, "encoder_unavailable"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, 504, "encoder_timeout"),
        (grpc.StatusCode.UNAUTHENTICATED, 502, "encoder_refused"),
        (grpc.StatusCode.INTERNAL, 502, "encoder_failed"),
    ],
)
def test_errors_of_the_encoder(llm: OpenAI, fake: Fake, code: grpc.StatusCode, status: int, name: str) -> None:
    fake.before = failing(code, retry_info(3, 0)) if status == 429 else failing(code)
    with pytest.raises(openai.APIStatusError) as caught:
        llm.chat.completions.create(model="tiny", messages=user(picture()))
    assert (caught.value.status_code, caught.value.code) == (status, name)
    assert caught.value.response.headers.get("retry-after") == ("3" if status == 429 else None)
    assert llm.chat.completions.create(model="tiny", messages=user()).choices, "text needs no encoder"


@pytest.mark.parametrize(
    ("urls", "code"),
    [
        ([picture()] * 3, "too_many_images"),
        ([picture(101, 100)], "invalid_image"),
        (["data:image/png;base64," + "QUJD" * 70_000], "image_too_large"),
    ],
)
def test_limits_of_images(llm: OpenAI, urls: list[str], code: str) -> None:
    with pytest.raises(openai.BadRequestError, match="limit") as caught:
        llm.chat.completions.create(model="tiny", messages=user(*urls))
    assert caught.value.code == code


def test_limits_of_requests(proxy: RouterProcess, stand_in: EngineProcess) -> None:
    answer = httpx2.post(proxy.url + CHAT, content=b"x" * 500_000, timeout=60)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")
    chunks = (b"x" * 1000 for _ in range(500))
    assert httpx2.post(proxy.url + CHAT, content=chunks, timeout=60).status_code == 413
    assert httpx2.get(proxy.url + "/v1/models", headers={"x": "y" * 5000}, timeout=60).status_code == 431
    assert (
        httpx2.post(proxy.url + CHAT, content=b"{}", headers={"content-encoding": "gzip"}, timeout=60).status_code
        == 415
    )
    stand_in.requests()


def test_a_body_that_does_not_arrive(proxy: RouterProcess) -> None:
    with socket.create_connection(("127.0.0.1", proxy.port)) as sock:
        sock.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{{".encode())
        answer = http.client.HTTPResponse(sock)
        answer.begin()
        assert (answer.status, json.loads(answer.read())["error"]["code"]) == (408, "request_timeout")


def test_an_engine_that_does_not_answer(llm: OpenAI) -> None:
    with pytest.raises(openai.InternalServerError) as caught:
        llm.chat.completions.create(model="silent", messages=user(picture()))
    assert (caught.value.status_code, caught.value.code) == (504, "engine_timeout")


def test_an_engine_that_breaks_off(llm: OpenAI) -> None:
    with pytest.raises(openai.APIConnectionError):
        llm.chat.completions.create(model="broken", messages=user())
    with (
        llm.chat.completions.create(model="broken-stream", messages=user(), stream=True) as stream,
        pytest.raises(openai.APIError, match="the engine closed the connection") as caught,
    ):
        list(stream)
    assert caught.value.code == "engine_failed"


ODD_ANSWERS = [
    (b"HTTP/1.1 600 Odd\r\nContent-Length: 2\r\n\r\nok", 502, b"status 600"),
    (b"HTTP/1.1 999 Odd\r\nContent-Length: 2\r\n\r\nok", 502, b"status 999"),
    (b"HTTP/1.1 101 Switching Protocols\r\n\r\n", 502, b"engine_failed"),
    (b"HTTP/1.1 2000 OK\r\n\r\n", 502, b"illegal status line"),
    (b"ICY 200 OK\r\n\r\n", 502, b"illegal status line"),
    (b"HTTP/1.1 299 \xff\r\nContent-Length: 2\r\n\r\nok", 299, b"ok"),
    (
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
        200,
        b"ok",
    ),
]


def test_odd_answers_of_an_engine(encoder: Running) -> None:
    """The caller gets them, or an error, never a broken connection."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        ThreadPoolExecutor(1) as pool,
        router(encoder.target, f"http://127.0.0.1:{listener.getsockname()[1]}", "--engine-health-path=") as proxy,
    ):
        for answer, status, body in ODD_ANSWERS:
            answered = pool.submit(answered_once, listener, answer)
            found = httpx2.get(proxy.url + "/v1/models", timeout=60)
            assert (answer, found.status_code) == (answer, status)
            assert body in found.content
            answered.result()
        assert "Traceback" not in proxy.log()


def answered_once(listener: socket.socket, answer: bytes) -> None:
    connection, _ = listener.accept()
    with connection:
        connection.recv(65536)
        connection.sendall(answer)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(65536):
            pass


def test_a_client_that_leaves_cancels_the_encoder(proxy: RouterProcess, fake: Fake, stand_in: EngineProcess) -> None:
    stand_in.requests()
    seen: list[grpc.ServicerContext] = []

    def wait(context: grpc.ServicerContext) -> None:
        if fake.methods[-1] != "GetModel":  # which other requests may wait for too
            seen.append(context)
            until(lambda: not context.is_active())

    fake.before = wait
    with leaving(proxy, request_body("tiny", picture(seed=5))):
        until(lambda: bool(seen))
    until(lambda: not seen[-1].is_active(), seconds=1.5)
    until(lambda: proxy.metric("vitwire_router_inflight_requests") == 0)
    assert stand_in.requests() == []


def test_a_client_that_does_not_read(proxy: RouterProcess, stand_in: EngineProcess) -> None:
    """Its request ends, and its connection does although bytes for it are left."""
    cancelled = stand_in.test("state")["cancelled"]
    before = connections(proxy)
    with leaving(proxy, request_body("flood")):
        until(lambda: stand_in.test("state")["cancelled"] > cancelled)
        until(lambda: proxy.metric("vitwire_router_inflight_requests") == 0)
        until(lambda: connections(proxy) <= before)


def connections(proxy: RouterProcess) -> int:
    return len(psutil.Process(proxy.process.pid).net_connections("tcp"))


def test_new_weights_have_new_content_ids(encoder: Running, fake: Fake, stand_in: EngineProcess) -> None:
    """Whatever the old ones cached in the engine: the description of the model is requested again."""
    seen = set()
    with router(encoder.target, stand_in.url) as proxy, client_of(proxy) as llm:

        def identify() -> bool:
            stand_in.requests()
            llm.chat.completions.create(model="tiny", messages=user(picture()))
            seen.add(stand_in.requests()[0]["body"]["messages"][0]["content"][1]["uuid"])
            return len(seen) == 2

        assert not identify()
        fake.fingerprint = "cd"
        try:
            until(identify)
        finally:
            fake.fingerprint = "ab"


@pytest.mark.parametrize("target", ["/v1/models?#x", "/v1/a#?", "/v1/a|b[]{}<>^`%zz?x=#y"])
def test_targets_pass_byte_for_byte(proxy: RouterProcess, stand_in: EngineProcess, target: str) -> None:
    stand_in.requests()
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=10) as sock:
        sock.sendall(f"GET {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        assert sock.makefile("rb").readline() == b"HTTP/1.1 200 OK\r\n"
    (request,) = stand_in.requests()
    assert request["raw_target"] == target


def test_malformed_http(proxy: RouterProcess) -> None:
    """The error has OpenAI's form; after a response, the connection is closed."""
    for sent in (b"GARBAGE\r\n\r\n", b"POST /v1/x HTTP/1.1\r\nHost: x\r\nContent-Length: x\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", proxy.port), timeout=10) as sock:
            sock.sendall(sent)
            response = http.client.HTTPResponse(sock)
            response.begin()
            assert (response.status, response.headers["content-type"]) == (400, "application/json")
            assert json.loads(response.read())["error"]["code"] == "invalid_http"
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=10) as sock:
        sock.sendall(head + b"%x\r\n" % 500_000 + b"x" * 500_000 + b"\r\nGARBAGE\r\n")
        assert b"request_too_large" in sock.makefile("rb").read()
    assert "Traceback" not in proxy.log()


def test_requests_in_flight_are_bounded(proxy: RouterProcess, llm: OpenAI, stand_in: EngineProcess) -> None:
    streams = [llm.chat.completions.create(model="slow", messages=user(), stream=True) for _ in range(3)]
    first = [next(stream) for stream in streams]
    assert len(first) == 3
    with pytest.raises(openai.RateLimitError) as caught:
        llm.chat.completions.create(model="tiny", messages=user())
    assert (caught.value.code, caught.value.response.headers["retry-after"]) == ("router_overloaded", "1")
    assert proxy.page("/livez")[0] == 200
    for stream in streams:
        stream.close()
    until(lambda: proxy.metric("vitwire_router_inflight_requests") == 0)
    assert llm.chat.completions.create(model="tiny", messages=user()).choices
    assert proxy.metric("vitwire_router_rejected_total", reason="requests") == 1


def test_health_follows_encoder_and_engine(proxy: RouterProcess, encoder: Running, stand_in: EngineProcess) -> None:
    encoder.health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    until(lambda: proxy.page("/health")[0] == 503)
    assert json.loads(proxy.page("/health")[1]) == {"status": "not ready", "encoder": "NOT_SERVING", "engine": "ok"}
    encoder.health.set("", health_pb2.HealthCheckResponse.SERVING)
    until(lambda: proxy.page("/health")[0] == 200)
    stand_in.test("sick")
    until(lambda: proxy.page("/health")[0] == 503)
    stand_in.test("well")
    until(lambda: proxy.page("/health")[0] == 200)
    assert proxy.page("/livez")[0] == 200


def test_drain_is_bounded(encoder: Running, stand_in: EngineProcess) -> None:
    with router(encoder.target, stand_in.url, "--drain-seconds=1") as proxy, client_of(proxy) as llm:
        with llm.chat.completions.create(model="slow", messages=user(), stream=True) as stream:
            next(stream)
            proxy.process.terminate()
            assert proxy.process.wait(30) == 0
            with pytest.raises(openai.APIConnectionError):
                list(stream)
        assert "Traceback" not in proxy.log()


@pytest.mark.parametrize("in_flight", [False, True])
def test_a_second_signal_ends_it_at_once(encoder: Running, stand_in: EngineProcess, *, in_flight: bool) -> None:
    with router(encoder.target, stand_in.url) as proxy, ExitStack() as stack:
        if in_flight:
            stream = stack.enter_context(leaving(proxy, request_body("slow", stream=True)))
            assert stream.recv(100).startswith(b"HTTP/1.1 200")
            waiting = stack.enter_context(leaving(proxy, request_body("silent", picture())))
            until(lambda: proxy.metric("vitwire_router_inflight_requests") == 2)
            assert waiting
        proxy.process.terminate()
        time.sleep(0.05)  # uvicorn waits 0.1 s in any case
        proxy.process.terminate()
        began = time.monotonic()
        assert proxy.process.wait(30) == 0
        assert time.monotonic() - began < 3
        assert proxy.log().count("cut off by shutdown") == (2 if in_flight else 0)
        assert "Traceback" not in proxy.log()
        assert "ERROR" not in proxy.log()
        assert proxy.log().rstrip().endswith("ended")


def test_nothing_behind_it(tmp_path: Path) -> None:
    with router(DEAD, f"http://{DEAD}", "--encoder-retries=0") as proxy, client_of(proxy) as llm:
        for messages, code in ((user(), "engine_unavailable"), (user(picture()), "encoder_unavailable")):
            with pytest.raises(openai.InternalServerError) as caught:
                llm.chat.completions.create(model="tiny", messages=messages)
            assert (caught.value.status_code, caught.value.code) == (503, code)
        assert proxy.page("/health")[0] == 503
        until(lambda: "WARNING not ready: encoder: " in proxy.log())
        assert f"the engine at {DEAD} cannot be reached" in proxy.log()
        assert proxy.page("/livez")[0] == 200
        assert proxy.metric("vitwire_router_failures_total", upstream="engine") == 1
        assert proxy.metric("vitwire_router_failures_total", upstream="encoder") == 1


def test_keys(encoder: Running, stand_in: EngineProcess, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("sk-one\nsk-two\n")
    (tmp_path / "engine").write_text("sk-engine\n")
    flags = (
        f"--api-keys-file={tmp_path / 'keys'}",
        f"--engine-api-key-file={tmp_path / 'engine'}",
        "--log-format=json",
    )
    stand_in.requests()
    with router(encoder.target, stand_in.url, *flags) as proxy:
        for key in ("sk-one", "sk-two"):
            with client_of(proxy, key) as llm:
                assert llm.chat.completions.create(model="tiny", messages=user(picture())).choices
        with client_of(proxy, "sk-three") as llm, pytest.raises(openai.AuthenticationError) as caught:
            llm.chat.completions.create(model="tiny", messages=user(picture()))
        assert caught.value.code == "invalid_api_key"
        assert proxy.page("/v1/models")[0] == 401
        assert proxy.page("/health")[0] == 200
        lines = [json.loads(line) for line in proxy.log().splitlines()]
        assert {"time", "level", "logger", "message"} <= set(lines[-1])
        where = stand_in.url.removeprefix("http://")
        assert lines[0]["message"] == f"encoder {encoder.target}, engine at {where}, mode inline"
        assert "sk-" not in proxy.log()
    assert {each["headers"]["authorization"] for each in stand_in.requests()} == {"Bearer sk-engine"}


def test_urls_of_an_allowed_host(encoder: Running, received: EngineProcess, tmp_path: Path) -> None:
    """The engine's echo route serves as the site."""
    flags = (f"--allow-image-host=127.0.0.1:{received.port}", "--allow-image-network=127.0.0.1/32")
    with router(encoder.target, received.url, *flags) as proxy, client_of(proxy) as llm:
        with pytest.raises(openai.BadRequestError) as caught:
            llm.chat.completions.create(model="tiny", messages=user(f"{received.url}/not-an-image"))
        assert caught.value.code == "invalid_image"
        (fetched,) = received.requests()
        assert fetched["path"] == "/not-an-image"
        assert "authorization" not in fetched["headers"]
        with pytest.raises(openai.BadRequestError) as caught:
            llm.chat.completions.create(model="tiny", messages=user("http://localhost/cat.jpg"))
        assert caught.value.code == "image_url_refused"


def test_hostile_bytes(proxy: RouterProcess) -> None:
    """No bytes make it fail or leave something behind."""
    post = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\n".encode()
    heads = [
        post + b"Content-Length: 50\r\n\r\n",
        post + b"Transfer-Encoding: chunked\r\n\r\n",
        post + b"Content-Type: multipart/form-data; boundary=B\r\nContent-Length: 50\r\n\r\n",
        b"GET /v1/\xff%00%0a HTTP/1.1\r\nHost: x\r\nx-request-id: \x01\x80\r\n\r\n",
        b"GET http://other.example/v1/models HTTP/1.1\r\nHost: other.example\r\n\r\n",
        b"CONNECT a:1 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /v1/x HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n",
        b"",
    ]
    rng = np.random.default_rng(0)
    for number in range(200):
        with socket.create_connection(("127.0.0.1", proxy.port), timeout=10) as sock, suppress(OSError):
            sock.sendall(heads[number % len(heads)] + rng.bytes(int(rng.integers(0, 200))))
            if number % 3:
                sock.shutdown(socket.SHUT_WR)
                sock.recv(100)
    until(lambda: proxy.metric("vitwire_router_inflight_requests") == 0)
    assert proxy.page("/livez")[0] == 200
    assert proxy.metric("vitwire_router_buffered_bytes") == 0
    assert proxy.metric("vitwire_router_requests_total", code="500") == 0
    assert "Traceback" not in proxy.log()
