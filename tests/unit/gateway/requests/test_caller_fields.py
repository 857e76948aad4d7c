"""What callers may not say in a request: embeddings, ids of contents, parameters of transfers."""

import json
from typing import Any

import pytest

from vitwire_gateway.api_errors import ApiError
from vitwire_gateway.requests.caller_fields import clean_body
from vitwire_gateway.requests.image_sources import Limits

Json = dict[str, Any]
LIMITS, ALLOWING = Limits(8, 100), Limits(8, 100, allow_embeds=True)
UUID = "f" * 64
ROWS = {"image_embeds": "AA", "image_grid_thw": "AA"}
EMBEDS: list[Json] = [
    {"type": "image_embeds", "image_embeds": ROWS},
    {"type": "image_embeds", "image_embeds": "AA"},
    {"type": "video_embeds", "video_embeds": {"video_embeds": "AA"}},
    {"type": "audio_embeds", "audio_embeds": "AA"},
    {"type": "prompt_embeds", "data": "AA"},
    {"image_embeds": ROWS},
    {"type": "text", "text": "t", "video_embeds": "AA"},
    {"type": "image_url", "image_url": {"url": "data:x"}, "image_embeds": "AA"},
    {"type": "image_pil", "image_pil": "AA"},
    {"type": "input_image", "image_embeds": ROWS},
]
WITHOUT_ROWS: list[Json] = [
    {"type": "image_embeds", "image_embeds": None},
    {"type": "image_embeds", "image_embeds": {"image_grid_thw": [1, 4, 4]}},
    {"type": "image_embeds", "image_embeds": {"image_embeds": None, "image_grid_thw": [1, 4, 4]}},
    {"type": "video_embeds"},
]
MEDIA: list[Json] = [
    {"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}},
    {"type": "input_audio", "input_audio": None},
    {"type": "audio_url", "audio_url": {"url": "data:x"}},
    {"type": "video_url", "video_url": None},
    {"type": "image_url", "image_url": None},
    {"type": "text", "text": "t", "image_url": None},
    {"image_pil": None},
    {"type": "input_image", "image_url": "data:x"},
]


def _in_chat(part: Json) -> Json:
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "t"}, part]}]}


PLACES = {
    "chat": _in_chat,
    "batch": lambda part: {"messages": [_in_chat(part)["messages"]]},
    "input": lambda part: {"input": {"content": [part]}},
    "score": lambda part: {"queries": {"content": [part]}, "documents": "d"},
    "rerank": lambda part: {"query": "q", "documents": [{"content": [part]}]},
    "data": lambda part: {"data_1": [part], "data_2": "t"},
    "nested": lambda part: _in_chat({"type": "group", "content": [part]}),
}


def cleaned(request: Json, limits: Limits = LIMITS) -> Any:
    """The request as the engine gets it."""
    body = json.dumps(request).encode()
    (sent,) = clean_body(body, limits) or [body]
    return json.loads(sent)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("part", EMBEDS + WITHOUT_ROWS)
@pytest.mark.parametrize("uuid", [{}, {"uuid": UUID}])
def test_embeddings_are_refused_wherever_they_are(place: str, part: Json, uuid: Json) -> None:
    with pytest.raises(ApiError, match="--allow-caller-embeds") as caught:
        cleaned(PLACES[place](part | uuid))
    assert (caught.value.status, caught.value.code) == (400, "embeds_refused")
    assert caught.value.param in (*part, part.get("type"))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("part", EMBEDS)
def test_embeddings_that_are_allowed_have_no_ids(place: str, part: Json) -> None:
    assert cleaned(PLACES[place](part | {"uuid": UUID}), ALLOWING) == PLACES[place](part)


@pytest.mark.parametrize("part", WITHOUT_ROWS[1:3])
def test_embeddings_need_rows(part: Json) -> None:
    """vLLM would take those of another by the grid alone."""
    with pytest.raises(ApiError, match="expected rows"):
        cleaned(PLACES["chat"](part), ALLOWING)
    assert cleaned(PLACES["chat"](WITHOUT_ROWS[0] | {"uuid": UUID}), ALLOWING) == PLACES["chat"](WITHOUT_ROWS[0])


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("part", MEDIA)
@pytest.mark.parametrize("uuid", [UUID, 7, {"a": 1}, None])
def test_ids_are_removed_wherever_they_are(place: str, part: Json, uuid: object) -> None:
    assert cleaned(PLACES[place](part | {"uuid": uuid})) == PLACES[place](part)


@pytest.mark.parametrize("value", [{"content_ids": [UUID]}, "text", [1], None])
def test_parameters_of_transfers_are_removed(value: object) -> None:
    """vLLM takes those of `vllm_xargs` too, of which a text ended its scheduler."""
    given = {"model": "m", "ec_transfer_params": value, "vllm_xargs": {"ec_transfer_params": value, "x": 1}}
    assert cleaned(given) == {"model": "m", "vllm_xargs": {"x": 1}}


def test_embeddings_of_prompts() -> None:
    for request in ({"prompt_embeds": "AA"}, {"prompt": "t", "prompt_embeds": ["AA"]}, {"input_embeds": [[0.5]]}):
        with pytest.raises(ApiError, match=f"{list(request)[-1]}: embeddings of callers are refused"):
            cleaned(request)
    with pytest.raises(ApiError, match="prompt_embeds"):  # vLLM reads reasoning as a part
        cleaned({"messages": [{"role": "assistant", "reasoning": {"type": "prompt_embeds", "data": "AA"}}]})
    assert cleaned({"prompt": "t", "prompt_embeds": None}) == {"prompt": "t", "prompt_embeds": None}


def test_what_is_the_callers_stays() -> None:
    schema = {"type": "object", "properties": {"uuid": {"type": "string"}, "image_embeds": {}, "image_url": {}}}
    order = {"uuid": UUID, "image_url": "https://example.com/cup.png"}
    request = {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}],
        "response_format": {"type": "json_schema", "json_schema": {"schema": schema}},
        "metadata": {"uuid": UUID},
        "messages": [
            {"role": "user", "content": "my uuid, image_embeds and ec_transfer_params"},
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": order}}]},
            {"role": "user", "uuid": UUID, "content": [{"type": "text", "text": "t", "cache_control": {}}]},
        ],
    }
    assert cleaned(request) == request


def _escaped(name: str) -> str:
    return "".join(f"\\u{ord(each):04x}" for each in name)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be"])
@pytest.mark.parametrize("name", ["uuid", _escaped("uuid"), "uu\\u0069d", "\\u0055uid"])
def test_tricks_of_json(encoding: str, name: str) -> None:
    """What vLLM's parser reads is inspected, and parsers that differ in duplicate keys get no choice."""
    part = f'{{"type": "image_url", "image_url": null, "{name}": "{UUID}"}}'
    body = f' \n{{"messages": [], "messages": [{{"content": [{part}]}}], "x": 1.5, "x": 2}}'.encode(encoding)
    (sent,) = clean_body(body, LIMITS)
    is_read = "55" not in name  # "Uuid" is another name
    assert (UUID.encode() in sent) is not is_read
    assert sent.count(b'"messages"') == sent.count(b'"x"') == 1
    assert json.loads(sent)["x"] == 2


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages": [{"role": "user", "content": "Hi"}],  "x": 1, "x": 2}',
        '{"prompt": "ü"}'.encode(),
        b"",
        b"uuid",
        bytes(range(256)),
        b'"uuid"',
    ],
)
def test_other_bodies_pass_as_they_are(body: bytes) -> None:
    assert clean_body(body, LIMITS) == []


@pytest.mark.parametrize("body", [b'{"uuid": 1', b'[{"uuid": 1}]', b'{"uuid": NaN}', b'{"a":' * 10_000 + b'"uuid"'])
def test_what_cannot_be_inspected_is_refused(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        clean_body(body, LIMITS)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


def test_deep_and_wide_requests() -> None:
    """A path to each value would take the square of the depth."""
    deep = b'{"a":' * 400 + b"[" + b"{}," * 100_000 + b'{"uuid": 1, "image": 1}]' + b"}" * 400
    (sent,) = clean_body(deep, LIMITS)
    assert b"uuid" not in sent
