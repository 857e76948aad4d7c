"""Requests for messages: their images, and their translation to chat requests."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitwire_gateway.anthropic.chat_requests import chat_request
from vitwire_gateway.anthropic.messages import images_of, is_anthropic
from vitwire_gateway.api_errors import ApiError
from vitwire_gateway.openai import chat
from vitwire_gateway.requests.filling import filled
from vitwire_gateway.requests.image_sources import Limits
from vitwire_gateway.requests.request_reading import RequestForm, cut_request

Json = dict[str, Any]
SOURCE = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
IMAGE = {"type": "image", "source": SOURCE}
RESULT = {"type": "tool_result", "tool_use_id": "t", "content": [IMAGE]}
LIMITS = Limits(9, 100)
API = RequestForm(images_of, chat_request)


def request(*blocks: Any, role: str = "user", **fields: Any) -> Json:
    return {"model": "m", "max_tokens": 9, "messages": [{"role": role, "content": list(blocks)}]} | fields


def test_paths_of_the_api() -> None:
    assert is_anthropic("/v1/messages")
    assert is_anthropic("/v1/messages/count_tokens")
    assert not is_anthropic("/v1/messages2")


def test_images_are_found() -> None:
    url = {"type": "image", "source": {"type": "url", "url": "https://a/b"}}
    found = images_of(request({"type": "text", "text": "t"}, IMAGE, RESULT, url))
    assert [(each.param, each.url, each.is_base64) for each in found] == [
        ("messages[0].content[1].source", "AAAA", True),
        ("messages[0].content[2].content[0].source", "AAAA", True),
        ("messages[0].content[3].source", "https://a/b", False),
    ]
    assert len(images_of(request(IMAGE, role="assistant"))) == 1
    schema = {"type": "tool_use", "id": "t", "name": "n", "input": {"content": [IMAGE], "image_url": "x"}}
    assert images_of(request(schema, role="assistant")) == []  # arguments of a tool are no images


@pytest.mark.parametrize(
    "body",
    [
        request({"type": "text", "text": "t"}, system=[IMAGE]),
        request(IMAGE, role="system"),
        request(RESULT, role="assistant"),
        request({"type": "document", "source": {"type": "content", "content": [IMAGE]}}),
        request({"type": "search_result", "content": [IMAGE]}),
        request(RESULT | {"content": [RESULT]}),
        request(RESULT | {"content": IMAGE}),
        {"messages": [IMAGE]},
        {"messages": [{"role": "user", "content": {"content": IMAGE}}]},
        {"messages": [{"role": "user", "source": [{"content": [IMAGE]}]}]},
        {"messages": [{"role": "user", "content": [[IMAGE]]}]},
        {"messages": [[IMAGE]]},
    ],
)
def test_images_in_other_places_are_refused(body: Json) -> None:
    with pytest.raises(ApiError, match="images belong in") as caught:
        images_of(body)
    assert (caught.value.status, caught.value.code) == (400, "unsupported_image")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (None, "expected {"),
        ("data:x", "expected {"),
        ({}, "expected {"),
        ({"type": "png", "data": "A"}, "expected {"),
        ({"type": ["base64"], "data": "A"}, "expected {"),
        ({"type": "base64"}, "source.data: expected a string"),
        ({"type": "base64", "data": ""}, "source.data: expected a string"),
        ({"type": "url", "url": 1}, "source.url: expected a string"),
        ({"type": "file", "file_id": "f"}, "files by id are not supported"),
    ],
)
def test_malformed_images(source: Any, reason: str) -> None:
    with pytest.raises(ApiError, match=reason) as caught:
        images_of(request({"type": "image", "source": source}))
    assert caught.value.status == 400


def test_each_image_keeps_its_name_and_its_file() -> None:
    """Tool results come before the other blocks of their message in the chat request."""
    other = {"type": "image", "source": SOURCE | {"data": "BBBB"}}
    body = request(other, RESULT, IMAGE)
    read = cut_request(json.dumps(body).encode(), None, LIMITS, API, "part")
    names = [(place.param, bytes(read.images.sources[place.source].content)) for place in read.images.places]
    assert names == [
        ("messages[0].content[1].content[0].source", b"\0\0\0"),
        ("messages[0].content[0].source", b"\4\x10\x41"),
        ("messages[0].content[2].source", b"\0\0\0"),
    ]
    parts = [{"type": "image_embeds", "n": number} for number in range(3)]
    sent = json.loads(b"".join(filled(read.pieces, parts)))
    assert sent["messages"] == [
        {"role": "tool", "tool_call_id": "t", "content": ""},
        {"role": "user", "content": parts[:1]},
        {"role": "user", "content": parts[1:]},
    ]


def test_base64_is_checked_as_in_data_uris() -> None:
    for data, code in (("A", "invalid_base64"), ("é===", "invalid_base64"), ("A" * 200, "image_too_large")):
        image = {"type": "image", "source": SOURCE | {"data": data}}
        (source,) = cut_request(json.dumps(request(image)).encode(), None, LIMITS, API, "part").images.sources
        assert (source.kind, source.content.code) == ("data", code)


def test_a_file_is_not_taken_for_a_url() -> None:
    """The same text as base64 and as a URL is two sources."""
    url = {"type": "image", "source": {"type": "url", "url": "AAAA"}}
    read = cut_request(json.dumps(request(IMAGE, url, IMAGE)).encode(), None, LIMITS, API, "part")
    assert [source.kind for source in read.images.sources] == ["data", "url"]
    assert [place.source for place in read.images.places] == [0, 1, 0]


TOOL = {"name": "n", "input_schema": {}}
USE = {"type": "tool_use", "id": "t", "name": "n", "input": {}}
REFUSED = [
    ({"max_tokens": None}, "max_tokens: expected an integer, got nothing"),
    ({"max_tokens": True}, "max_tokens: expected an integer, got bool"),
    ({"messages": {}}, "messages: expected a list, got dict"),
    ({"messages": ["a"]}, r"messages\[0\]: expected an object"),
    ({"messages": [{"role": "tool", "content": "x"}]}, r"messages\[0\].role: expected user, assistant or system"),
    ({"messages": [{"role": "user", "content": 1}]}, r"messages\[0\].content: expected a list"),
    ({"messages": [{"role": "user", "content": "x", "name": "y"}]}, r"messages\[0\].name: with images"),
    ({"messages": [{"role": "system", "content": [USE]}]}, "the content of system takes blocks of type text$"),
    ({"mcp_servers": []}, "mcp_servers: with images in the request, this field is not supported"),
    ({"system": [{"type": "text"}]}, r"system\[0\].text: expected a string, got nothing"),
    ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, r"tools\[0\].type: with images"),
    ({"tools": [TOOL | {"allowed_callers": []}]}, r"tools\[0\].allowed_callers: with images"),
    ({"tools": [{"name": "n"}]}, r"tools\[0\].input_schema: expected an object"),
    ({"tools": [1]}, r"tools\[0\]: expected an object"),
    ({"tool_choice": {"type": "some"}}, "tool_choice.type: expected auto"),
    ({"tool_choice": {"type": ["any"]}}, "tool_choice.type: expected auto"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice.name: expected a string"),
    ({"thinking": {"type": "much"}}, "thinking.type: expected enabled"),
    ({"thinking": {}}, "thinking.type: expected enabled"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens: expected an integer"),
    ({"output_config": {"task_budget": {}}}, "output_config.task_budget: with images"),
    ({"output_config": {"format": {"type": "text"}}}, "output_config.format.type: expected json_schema"),
]


@pytest.mark.parametrize(("fields", "reason"), REFUSED)
def test_what_cannot_be_translated_is_refused(fields: Json, reason: str) -> None:
    with pytest.raises(ApiError, match=reason) as caught:
        chat_request(request(IMAGE) | fields)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("block", "role", "reason"),
    [
        ({"type": "document", "source": {}}, "user", r"content\[0\].type: with images in the request"),
        (USE, "user", r"content\[0\].type: with images in the request"),
        ({"type": ["text"]}, "user", r"content\[0\].type: with images in the request"),
        (RESULT, "assistant", r"content\[0\].type: with images in the request"),
        (IMAGE | {"transformations": {}}, "user", r"content\[0\].transformations: with images"),
        ({"type": "text", "text": "t", "citations": [1]}, "assistant", r"content\[0\].citations: with images"),
        (USE | {"caller": {"type": "direct"}}, "assistant", r"content\[0\].caller: with images"),
        (USE | {"input": "x"}, "assistant", r"content\[0\].input: expected an object"),
        ({"type": "thinking"}, "assistant", r"content\[0\].thinking: expected a string"),
        (RESULT | {"tool_use_id": None}, "user", r"content\[0\].tool_use_id: expected a string"),
        (RESULT | {"content": [USE]}, "user", r"content\[0\].content\[0\].type: with images"),
    ],
)
def test_blocks_that_cannot_be_translated_are_refused(block: Json, role: str, reason: str) -> None:
    with pytest.raises(ApiError, match=reason):
        chat_request(request(block, role=role))


@pytest.mark.parametrize("depth", [10, 100_000])
def test_deep_arguments_of_tools(depth: int) -> None:
    nest: Any = {}
    for _ in range(depth):
        nest = {"a": nest}
    body = request(IMAGE, USE | {"input": nest}, role="assistant")
    if depth == 10:
        assert json.dumps(nest) == chat_request(body)["messages"][0]["tool_calls"][0]["function"]["arguments"]
        return
    with pytest.raises(ApiError, match="nested too deeply") as caught:
        chat_request(body)
    assert caught.value.param == "messages[0].content[1].input"


def test_names_in_errors_are_short() -> None:
    with pytest.raises(ApiError) as caught:
        chat_request(request(IMAGE) | {"x" * 100_000: 1})
    assert len(str(caught.value)) < 200


KEYS = ("type", "role", "content", "source", "data", "url", "text", "input", "id", "name", "tool_use_id", "thinking")
WORDS = ("user", "assistant", "text", "image", "tool_result", "tool_use", "thinking", "base64", "url", "AAAA", "")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from(WORDS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=20,
)
BLOCK = st.sampled_from([IMAGE, RESULT, USE]) | st.fixed_dictionaries(
    {"type": st.sampled_from(WORDS)}, optional=dict.fromkeys(KEYS[2:], JSON)
)
MESSAGE = st.fixed_dictionaries({"role": st.sampled_from(WORDS[:2]) | JSON, "content": st.lists(BLOCK) | JSON})


@given(
    st.fixed_dictionaries({"max_tokens": st.just(5), "messages": st.lists(MESSAGE) | JSON}, optional={"system": JSON})
)
def test_anything_is_translated_with_all_images_or_refused(body: Json) -> None:
    try:
        found = images_of(body)
        translated = chat_request(body)
    except ApiError as error:
        assert error.status == 400
        return
    assert sorted(each.param for each in found) == sorted(each.url for each in chat.images_of(translated))
