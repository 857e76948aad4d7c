"""Chat completions as messages, where vLLM's conversion has no example: broken and hostile answers of an engine.

tests/engines/vllm compares whole ones with that conversion.
"""

import json
from collections.abc import AsyncIterator
from typing import Any
from uuid import UUID

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitwire_gateway.anthropic.chat_answers import error_message_of, message_of, translated_error
from vitwire_gateway.anthropic.message_events import MessageEvents, shortened
from vitwire_gateway.api_errors import ApiError
from vitwire_gateway.router.endpoint import Exchange

Json = dict[str, Any]


def event(content: Json) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\r\n\r\n"


def chunk(**delta: Any) -> bytes:
    return event({"id": "c", "model": "m", "choices": [{"index": 0, "delta": delta}]})


def fed(events: MessageEvents, content: bytes) -> bytes:
    return b"".join(map(events.following, events.texts(content)))


def read(events: bytes) -> list[Json]:
    return [json.loads(line[6:]) for line in events.splitlines() if line.startswith(b"data: ")]


def test_a_stream_that_ends_early_ends_in_an_error() -> None:
    events = MessageEvents(100)
    assert [each["type"] for each in read(fed(events, chunk(content="a")))] == [
        "message_start", "content_block_start", "content_block_delta",
    ]  # fmt: skip
    stop, error = read(events.ended())
    assert (stop["type"], error["error"]["type"]) == ("content_block_stop", "api_error")
    assert events.ended() == b""


def test_nothing_follows_an_error_or_the_end() -> None:
    failed = MessageEvents(100)
    fed(failed, event({"error": {"message": "no embedding", "code": 400}}))
    assert (fed(failed, chunk(content="a") + b"data: [DONE]\n\n"), failed.ended()) == (b"", b"")
    whole = MessageEvents(100)
    fed(whole, chunk(content="a") + b"data: [DONE]\n\n")
    assert (fed(whole, chunk(content="b")), whole.ended()) == (b"", b"")
    assert (whole.texts(event({"large": "a" * 200})), whole.texts(b"a" * 200)) == ([], [])


def test_an_answer_without_counts_ends_all_the_same() -> None:
    events = read(fed(MessageEvents(100), b": comment\n\n" + chunk(content="a") + b"data: [DONE]\n\n"))
    assert [each["type"] for each in events[-3:]] == ["content_block_stop", "message_delta", "message_stop"]
    assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}


def test_counts_in_the_middle_of_an_answer_do_not_end_it() -> None:
    counts = event({"id": "c", "model": "m", "choices": [], "usage": {"prompt_tokens": 7}})
    events = read(fed(MessageEvents(100), chunk(content="a") + counts + chunk(content="b") + b"data: [DONE]\n\n"))
    assert [each["type"] for each in events] == [
        "message_start", "content_block_start", "content_block_delta", "content_block_delta",
        "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip
    assert events[-2]["usage"]["input_tokens"] == 7


def test_text_that_is_none_beside_a_call_is_refused() -> None:
    events = MessageEvents(1000)
    call = {"index": 0, "id": "t", "function": {"name": "f", "arguments": "{}"}}
    fed(events, chunk(tool_calls=[call]) + chunk(content=["a"]))
    with pytest.raises(ApiError, match="cannot be translated"):
        fed(events, b"data: [DONE]\n\n")
    assert [each["type"] for each in read(events.ended())] == ["error"]


def test_deep_arguments_of_a_call_are_passed_on() -> None:
    call = {"index": 0, "id": "t", "function": {"name": "n", "arguments": "[" * 100_000}}
    events = read(fed(MessageEvents(1 << 20), chunk(tool_calls=[call]) + b"data: [DONE]\n\n"))
    assert [each["type"] for each in events[-2:]] == ["message_delta", "message_stop"]


def test_an_event_is_bounded() -> None:
    events = MessageEvents(100)
    fed(events, b"x" * 90)
    with pytest.raises(ApiError, match="an event of more than 100 bytes") as caught:
        fed(events, b"x" * 90)
    assert caught.value.code == "engine_failed"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"choices": [1]}', '{"choices": [{}]}', "[" * 100_000])
def test_what_is_no_answer(text: str) -> None:
    with pytest.raises(ApiError, match="cannot be translated"):
        message_of(text.encode())
    with pytest.raises(ApiError, match="cannot be translated"):
        fed(MessageEvents(1 << 20), b"data: " + text.encode() + b"\n\n")


def test_calls_with_broken_arguments_are_no_answer() -> None:
    call = {"id": "t", "function": {"name": "n", "arguments": '{"a'}}
    choice = {"message": {"tool_calls": [call]}, "finish_reason": "length"}
    with pytest.raises(ApiError, match="cannot be translated"):
        message_of(json.dumps({"id": "c", "model": "m", "choices": [choice]}).encode())


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (400, b'{"error": {"message": "too long"}}', "too long"),
        (404, b'{"detail": "Not Found"}', '{"detail": "Not Found"}'),
        (502, b"<html>", "<html>"),
        (500, b"", "the engine answered with 500"),
        (500, b"\xff" * 5000, "\ufffd" * 500),
    ],
)
def test_errors_in_any_form(status: int, body: bytes, message: str) -> None:
    assert translated_error(status, body) == error_message_of(status, message)


@given(st.lists(st.binary(max_size=40) | st.just(chunk(content="a")) | st.just(b"\ndata: ")), st.integers(1, 50))
def test_any_bytes_are_events_or_an_error(pieces: list[bytes], size: int) -> None:
    content, events, sent = b"".join(pieces), MessageEvents(1 << 20), b""
    try:
        for at in range(0, len(content), size):
            sent += fed(events, content[at : at + size])
        sent += events.ended()
    except ApiError as error:
        sent += events.failed(error)
    assert read(sent)[-1]["type"] in ("error", "message_stop")


LARGE = [
    chunk(content="é" * 100_000),
    chunk(reasoning="x" * 100_000),
    chunk(tool_calls=[{"index": 0, "id": "t", "function": {"name": "n", "arguments": "[,]" * 40_000}}]),
    event({"error": {"message": "x" * 100_000, "code": 400}}),
    event({"id": "c", "model": "m", "choices": [], "usage": {"prompt_tokens": 7}, "x": [[]] * 100_000}),
    event({"id": "c", "model": "m", "x": [[]] * 300_000, "choices": [{"delta": {}, "finish_reason": "length"}]}),
]


@pytest.mark.parametrize("large", LARGE)
def test_a_shortened_event_means_the_same(large: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitwire_gateway.anthropic.message_events.uuid4", lambda: UUID(int=1))  # of signatures
    whole, shorter = MessageEvents(1 << 22), MessageEvents(1 << 22)
    (text,) = whole.texts(large)
    short = shortened(text)
    assert short.count(b"[]") <= 1
    assert read(whole.following(text) + whole.ended()) == read(shorter.following(short) + shorter.ended())


@pytest.mark.parametrize(
    "delta", [{"content": [[]] * 3000}, {"tool_calls": [{}] * 3000}, {"reasoning": {"x": [7] * 3000}}]
)
def test_many_values_are_refused(delta: Json) -> None:
    (text,) = MessageEvents(1 << 20).texts(chunk(**delta))
    with pytest.raises(ApiError, match="values, the limit is 2000"):
        shortened(text)


@pytest.mark.parametrize("text", [b"", b"[]", b"7", b'{"choices": [1]}', b"[" * 100_000, b'{"choices": [{}]}'])
def test_what_is_no_event_is_refused_when_shortened(text: bytes) -> None:
    with pytest.raises(ApiError, match="cannot be translated"):
        MessageEvents(1 << 20).following(shortened(text))


async def test_large_events_are_read_in_a_worker() -> None:
    """Others wait 130 ms for an event of 1 MiB with 300,000 values, if it is read on the event loop."""
    seen, sent = list[int](), list[Any]()

    async def shorten(text: bytes) -> bytes:
        seen.append(len(text))
        return shortened(text)

    async def send(message: Any) -> None:
        sent.append(message)

    async def content() -> AsyncIterator[bytes]:
        for each in (chunk(content="a"), LARGE[5], chunk(content="b"), b"data: [DONE]\n\n"):
            yield each

    scope = {"type": "http", "method": "POST", "path": "/v1/messages", "headers": [], "query_string": b""}
    exchange = Exchange(scope, content, send, 10.0)
    response = httpx2.Response(200, headers={"content-type": "text/event-stream"}, content=content())
    await exchange.relay(response, MessageEvents(1 << 21), shorten)
    assert seen == [len(LARGE[5].strip()) - len("data: ")]
    found = read(b"".join(each.get("body", b"") for each in sent))
    assert [each["delta"]["text"] for each in found if each["type"] == "content_block_delta"] == ["a", "b"]
    assert found[-2]["delta"]["stop_reason"] == "max_tokens"
