"""Chat completions as messages, where vLLM's conversion has no example: broken and hostile answers of an engine.

tests/engines/vllm compares whole ones with that conversion.
"""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitwire_gateway.anthropic.answers import MessageEvents, error_message_of, message_of, translated_error
from vitwire_gateway.api_errors import ApiError

Json = dict[str, Any]


def event(content: Json) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\r\n\r\n"


def chunk(**delta: Any) -> bytes:
    return event({"id": "c", "model": "m", "choices": [{"index": 0, "delta": delta}]})


def read(events: bytes) -> list[Json]:
    return [json.loads(line[6:]) for line in events.splitlines() if line.startswith(b"data: ")]


def test_a_stream_that_ends_early_ends_in_an_error() -> None:
    events = MessageEvents(100)
    assert [each["type"] for each in read(events.fed(chunk(content="a")))] == [
        "message_start", "content_block_start", "content_block_delta",
    ]  # fmt: skip
    stop, error = read(events.ended())
    assert (stop["type"], error["error"]["type"]) == ("content_block_stop", "api_error")
    assert events.ended() == b""


def test_nothing_follows_an_error_or_the_end() -> None:
    failed = MessageEvents(100)
    failed.fed(event({"error": {"message": "no embedding", "code": 400}}))
    assert (failed.fed(chunk(content="a") + b"data: [DONE]\n\n"), failed.ended()) == (b"", b"")
    whole = MessageEvents(100)
    whole.fed(chunk(content="a") + b"data: [DONE]\n\n")
    assert (whole.fed(chunk(content="b")), whole.ended()) == (b"", b"")


def test_an_answer_without_counts_ends_all_the_same() -> None:
    events = read(MessageEvents(100).fed(b": comment\n\n" + chunk(content="a") + b"data: [DONE]\n\n"))
    assert [each["type"] for each in events[-3:]] == ["content_block_stop", "message_delta", "message_stop"]
    assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}


def test_deep_arguments_of_a_call_are_passed_on() -> None:
    call = {"index": 0, "id": "t", "function": {"name": "n", "arguments": "[" * 100_000}}
    events = read(MessageEvents(1 << 20).fed(chunk(tool_calls=[call]) + b"data: [DONE]\n\n"))
    assert [each["type"] for each in events[-2:]] == ["message_delta", "message_stop"]


def test_an_event_is_bounded() -> None:
    events = MessageEvents(100)
    events.fed(b"x" * 90)
    with pytest.raises(ApiError, match="an event of more than 100 bytes") as caught:
        events.fed(b"x" * 90)
    assert caught.value.code == "engine_failed"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"choices": [1]}', '{"choices": [{}]}', "[" * 100_000])
def test_what_is_no_answer(text: str) -> None:
    with pytest.raises(ApiError, match="cannot be translated"):
        message_of(text.encode())
    with pytest.raises(ApiError, match="cannot be translated"):
        MessageEvents(1 << 20).fed(b"data: " + text.encode() + b"\n\n")


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
            sent += events.fed(content[at : at + size])
        sent += events.ended()
    except ApiError as error:
        sent += events.failed(error)
    assert read(sent)[-1]["type"] in ("error", "message_stop")
