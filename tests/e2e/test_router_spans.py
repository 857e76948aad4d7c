"""Spans of `vitwire router`: one trace from the caller to the server, named by OpenTelemetry's GenAI conventions."""

import http.client
import json
import re
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any

import openai
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from collectors import SOON, Collector, attributes, collecting
from encoded_files import photograph, saved
from entered import entered
from routers import CHAT, EngineProcess, RouterProcess, client_of, leaving, picture, router, serving_file, user
from servers import ServerProcess, serving
from waiting import until

PARENT = "00f067aa0ba902b7"
_NUMBERS = count(1)
SERVER, CLIENT = Span.SPAN_KIND_SERVER, Span.SPAN_KIND_CLIENT

FLAGS = ("--cache-bytes", "100000000", "--otlp-endpoint")

collector = entered(collecting)
server = entered(
    lambda checkpoints, collector: serving(checkpoints("qwen3_vl"), *FLAGS, collector.endpoint, variables=SOON)
)

pictures = entered(lambda: serving_file(saved(photograph(64, 64), "PNG")))
"""The port of a server with an image."""


@pytest.fixture(scope="module", params=["inline", "reference"])
def proxy(
    server: ServerProcess, stand_in: EngineProcess, collector: Collector, pictures: int, request: Any
) -> Iterator[RouterProcess]:
    flags = ("--otlp-endpoint", collector.endpoint, "--mode", request.param)
    urls = ("--allow-image-host", f"127.0.0.1:{pictures}", "--allow-image-network", "127.0.0.0/8")
    with router(server.target, stand_in.url, *flags, *urls, environment=SOON) as process:
        yield process


def sent(proxy: RouterProcess, path: str, body: bytes, method: str = "POST", **headers: str) -> tuple[int, bytes]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    with closing(http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=30)) as connection:
        connection.request(method, path, body, {"content-type": "application/json"} | named)
        with connection.getresponse() as response:
            return response.status, response.read()


def trace_of(collector: Collector, trace_id: str, *, encoded: int = 0) -> dict[str, list[Span]]:
    """The spans of a trace by name, once the router's has arrived, and so many of the server's."""
    mine = bytes.fromhex(trace_id)
    collector.wait_for(lambda span: span.trace_id == mine and "url.path" in attributes(span))
    collector.wait_for(lambda span: span.trace_id == mine and "/Encode" in span.name, encoded)
    found: dict[str, list[Span]] = {}
    for span in collector.spans:
        if span.trace_id == mine:
            found.setdefault(span.name, []).append(span)
    return found


def asked() -> tuple[str, str]:
    """The id of a new trace, and the header of a caller's span in it."""
    trace_id = f"4bf92f3577b34da6a3ce929d{next(_NUMBERS):08x}"
    return trace_id, f"00-{trace_id}-{PARENT}-01"


def test_one_trace_from_the_caller_to_the_server_and_the_engine(
    proxy: RouterProcess, stand_in: EngineProcess, collector: Collector, pictures: int
) -> None:
    reference = proxy.log().count("mode reference") > 0
    trace_id, parent = asked()
    body = {"model": "tiny", "messages": user(picture(64, 64, seed=reference), f"http://127.0.0.1:{pictures}/cat.png")}
    stand_in.requests()
    headers = {"traceparent": parent, "tracestate": "vendor=1", "x_request_id": "order-66"}
    assert sent(proxy, CHAT, json.dumps(body).encode(), **headers)[0] == 200
    spans = trace_of(collector, trace_id, encoded=2)

    (request,) = spans["chat tiny"]
    assert (request.parent_span_id.hex(), request.kind) == (PARENT, SERVER)
    assert request.status.code == Status.STATUS_CODE_UNSET
    assert attributes(request) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": "tiny",
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "http.route": CHAT,
        "server.address": "127.0.0.1",
        "server.port": proxy.port,
        "url.path": CHAT,
        "url.scheme": "http",
        "vitwire.images": 2,
        "vitwire.request_id": "order-66",
    }
    (images,), (called,) = spans["images"], spans["engine"]
    assert {each.parent_span_id for each in (images, called, *spans["receive"])} == {request.span_id}
    (fetched,) = spans["fetch"]
    assert (fetched.parent_span_id, fetched.kind) == (images.span_id, CLIENT)
    encoded = spans["store" if reference else "encode"]
    assert [each.parent_span_id for each in encoded] == [images.span_id] * 2
    served = [span for name in spans if "/Encode" in name for span in spans[name]]
    assert {each.parent_span_id for each in served} == {each.span_id for each in encoded}
    assert all(attributes(each)["vitwire.request_id"] == "order-66" for each in served)

    assert called.kind == CLIENT
    assert attributes(called)["http.response.status_code"] == 200
    (received,) = stand_in.requests()
    assert received["headers"]["traceparent"] == f"00-{trace_id}-{called.span_id.hex()}-01"
    assert received["headers"]["tracestate"] == "vendor=1"
    assert request.start_time_unix_nano <= images.start_time_unix_nano <= called.start_time_unix_nano
    assert called.end_time_unix_nano <= request.end_time_unix_nano
    recorded = str(list(spans.values()))
    assert "Describe" not in recorded
    assert "cat.png" not in recorded
    assert "base64" not in recorded


def test_a_stream_has_the_time_to_its_first_chunk(proxy: RouterProcess, collector: Collector) -> None:
    trace_id, parent = asked()
    began = time.perf_counter()
    with client_of(proxy) as llm:
        stream: Any = llm.chat.completions.create(
            model="tiny", messages=user(), stream=True, extra_headers={"traceparent": parent}
        )
        assert next(stream)
        received = time.perf_counter() - began
        assert list(stream)
    (span,) = trace_of(collector, trace_id)["chat tiny"][-1:]
    (seconds,) = (a.value.double_value for a in span.attributes if a.key == "gen_ai.response.time_to_first_chunk")
    assert 0 < seconds < received, "the span's own length is of the wall clock, which may be set meanwhile"


@pytest.mark.parametrize(
    ("path", "method", "name", "operation"),
    [
        ("/v1/completions", "POST", "text_completion", "text_completion"),
        ("/v1/embeddings", "POST", "embeddings", "embeddings"),
        ("/v1/models", "GET", "GET", None),
        ("/v1/files/of?secret=yes", "BREW", "HTTP", None),
    ],
)
def test_every_route_has_a_span(
    proxy: RouterProcess, collector: Collector, path: str, method: str, name: str, operation: str | None
) -> None:
    trace_id, parent = asked()
    sent(proxy, path, b'{"model": "m"}', method, traceparent=parent)
    spans = trace_of(collector, trace_id)
    (span,) = spans[name]
    assert attributes(span).get("gen_ai.operation.name") == operation
    assert attributes(span)["url.path"] == path.partition("?")[0]
    assert "secret" not in str(span)
    assert spans["engine"][0].parent_span_id == span.span_id


@pytest.mark.parametrize(
    ("path", "body", "provider"),
    [
        ("/v1/embeddings", {"input": picture()}, "vitwire"),
        ("/v1/embeddings", {"input": "data:image/png;base64,AAAA"}, "vitwire"),
        ("/v1/embeddings", {"input": "a cat"}, "vllm"),
        ("/v2/embed", {"texts": ["a cat"]}, "vitwire"),
    ],
)
def test_the_provider_is_who_answers(
    proxy: RouterProcess, collector: Collector, path: str, body: Any, provider: str
) -> None:
    trace_id, parent = asked()
    sent(proxy, path, json.dumps(body).encode(), traceparent=parent)
    (span,) = trace_of(collector, trace_id)["embeddings"]
    assert attributes(span)["gen_ai.provider.name"] == provider


@pytest.mark.parametrize(
    ("model", "status", "error", "code"),
    [
        ("status-500", 500, "500", Status.STATUS_CODE_ERROR),
        ("status-404", 404, "404", Status.STATUS_CODE_UNSET),
        ("broken", 200, "engine_failed", Status.STATUS_CODE_ERROR),
    ],
)
def test_errors_of_the_engine(
    proxy: RouterProcess, collector: Collector, model: str, status: int, error: str, code: Any
) -> None:
    trace_id, parent = asked()
    try:
        answered, _ = sent(proxy, CHAT, json.dumps({"model": model, "messages": []}).encode(), traceparent=parent)
        assert answered == status
    except http.client.IncompleteRead:
        assert model == "broken"
    (span,) = trace_of(collector, trace_id)[f"chat {model}"]
    assert attributes(span)["http.response.status_code"] == status
    assert (attributes(span)["error.type"], span.status.code) == (error, code)


def test_errors_of_the_router(proxy: RouterProcess, collector: Collector) -> None:
    trace_id, parent = asked()
    body = {"model": "tiny", "messages": user("data:image/png;base64,AAAA")}
    assert sent(proxy, CHAT, json.dumps(body).encode(), traceparent=parent)[0] == 400
    spans = trace_of(collector, trace_id)
    (span,) = spans["chat tiny"]
    assert (attributes(span)["error.type"], span.status.code) == ("invalid_image", Status.STATUS_CODE_UNSET)
    assert "engine" not in spans


def test_a_caller_that_leaves(proxy: RouterProcess, stand_in: EngineProcess, collector: Collector) -> None:
    stand_in.requests()
    sock = leaving(proxy, {"model": "silent", "messages": []})
    until(lambda: bool(stand_in.requests()))
    before = len([span for span in collector.spans if span.name == "chat silent"])
    sock.close()
    span = collector.wait_for(lambda each: each.name == "chat silent", before + 1)[-1]
    assert attributes(span)["error.type"] == "client_disconnected"
    assert span.status.code == Status.STATUS_CODE_UNSET
    (called,) = collector.wait_for(lambda each: each.parent_span_id == span.span_id and each.name == "engine")
    assert attributes(called)["error.type"] == "cancelled"


@pytest.mark.parametrize("model", ["\ud800" * 300, "x" * 100_000, 7, "a\x00b"])
def test_a_hostile_model_is_cut_and_harms_no_other_span(proxy: RouterProcess, collector: Collector, model: Any) -> None:
    trace_id, parent = asked()
    body = json.dumps({"model": model, "messages": user("data:image/png;base64,AAAA")}).encode()
    name = f"id-{trace_id}"
    assert sent(proxy, CHAT, body, traceparent=parent, x_request_id=name)[0] == 400
    mine = bytes.fromhex(trace_id)
    (span,) = collector.wait_for(lambda each: each.trace_id == mine and "url.path" in attributes(each))
    assert len(span.name) <= 261
    assert attributes(span)["vitwire.request_id"] == name


@pytest.mark.parametrize("parent", ["", "00-zz", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "x" * 1000])
def test_a_malformed_parent_begins_a_trace(
    proxy: RouterProcess, stand_in: EngineProcess, collector: Collector, parent: str
) -> None:
    name = f"malformed-{len(parent)}-{proxy.port}"
    stand_in.requests()
    headers = {"traceparent": parent, "tracestate": "evil=1", "x_request_id": name}
    assert sent(proxy, CHAT, b'{"model": "tiny", "messages": []}', **headers)[0] == 200
    (span,) = collector.wait_for(lambda each: attributes(each).get("vitwire.request_id") == name)
    assert span.parent_span_id == b""
    (received,) = stand_in.requests()
    assert re.fullmatch(f"00-{span.trace_id.hex()}-[0-9a-f]{{16}}-0[13]", received["headers"]["traceparent"])
    assert "tracestate" not in received["headers"]


def test_what_the_caller_does_not_sample_is_passed_on_unsampled(
    proxy: RouterProcess, stand_in: EngineProcess, collector: Collector
) -> None:
    trace_id, parent = asked()
    stand_in.requests()
    sent(proxy, CHAT, b'{"model": "tiny", "messages": []}', traceparent=parent[:-1] + "0")
    (received,) = stand_in.requests()
    assert received["headers"]["traceparent"].startswith(f"00-{trace_id}-")
    assert received["headers"]["traceparent"].endswith("-00")
    after, parent = asked()
    sent(proxy, CHAT, b'{"model": "tiny", "messages": []}', traceparent=parent)
    trace_of(collector, after)
    assert not [span for span in collector.spans if span.trace_id == bytes.fromhex(trace_id)]


def test_without_a_collector_the_callers_parent_is_passed_on(
    server: ServerProcess, stand_in: EngineProcess, collector: Collector
) -> None:
    trace_id, parent = asked()
    stand_in.requests()
    with router(server.target, stand_in.url) as plain:
        body = json.dumps({"model": "tiny", "messages": user(picture(32, 64))}).encode()
        assert sent(plain, CHAT, body, traceparent=parent)[0] == 200
        maps = Path(f"/proc/{plain.process.pid}/maps").read_text()
    (received,) = stand_in.requests()
    assert received["headers"]["traceparent"] == parent
    mine = bytes.fromhex(trace_id)
    spans = collector.wait_for(lambda each: each.trace_id == mine and each.name.endswith("/Encode"))
    assert {span.parent_span_id.hex() for span in spans} == {PARENT}
    assert "opentelemetry" not in maps


def test_an_encoder_that_is_away(stand_in: EngineProcess, collector: Collector) -> None:
    trace_id, parent = asked()
    flags = ("--otlp-endpoint", collector.endpoint, "--encoder-retries", "0", "--encoder-wait", "2")
    with router("127.0.0.1:9", stand_in.url, *flags) as proxy, client_of(proxy) as llm:
        with pytest.raises(openai.InternalServerError):
            llm.chat.completions.create(model="tiny", messages=user(picture()), extra_headers={"traceparent": parent})
        assert proxy.stop() == 0, "it sends remaining spans"
    spans = trace_of(collector, trace_id)
    (span,) = spans["chat tiny"]
    assert span.status.code == Status.STATUS_CODE_ERROR
    assert str(attributes(span)["error.type"]).startswith("encoder_")
    (encoded,) = spans["encode"]
    assert encoded.status.code == Status.STATUS_CODE_ERROR
    assert not encoded.events, "messages of errors are not recorded"


def test_pipelined_requests_have_their_traces(proxy: RouterProcess, collector: Collector) -> None:
    """uvicorn may start the second within the context of the first."""
    trace_id, parent = asked()
    body = b'{"model": "tiny", "messages": []}'
    names = [f"{trace_id}-{number}" for number in range(2)]
    heads = [f"x-request-id: {names[0]}\r\ntraceparent: {parent}", f"x-request-id: {names[1]}"]
    requests = [f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n{head}\r\n\r\n" for head in heads]
    with socket.create_connection(("127.0.0.1", proxy.port)) as sock:
        sock.sendall(b"".join(request.encode() + body for request in requests))
        found = [
            collector.wait_for(lambda each, name=name: attributes(each).get("vitwire.request_id") == name)[0]
            for name in names
        ]
    assert found[0].trace_id.hex() == trace_id
    assert (found[1].trace_id == found[0].trace_id, found[1].parent_span_id) == (False, b"")
