"""Requests for responses: their images, and what is put in their place."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitwire_gateway.api_errors import ApiError
from vitwire_gateway.gateway_settings import Engine
from vitwire_gateway.openai.responses import images_of
from vitwire_gateway.requests.filling import cut, filled
from vitwire_gateway.requests.image_refs import image_parts
from vitwire_gateway.requests.image_sources import Limits
from vitwire_gateway.requests.request_reading import RequestForm, cut_request

Json = dict[str, Any]
IMAGE = {"type": "input_image", "image_url": "data:x", "detail": "low"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": [IMAGE]}


def request(*items: Any) -> Json:
    return {"model": "m", "input": list(items)}


def user(*parts: Any) -> Json:
    return {"role": "user", "content": list(parts)}


def test_images_are_found_in_messages_and_outputs() -> None:
    custom = OUTPUT | {"type": "custom_tool_call_output"}
    text = {"type": "input_text", "text": "t"}
    found = images_of(request(user(text, IMAGE), {"role": "user", "content": "t"}, OUTPUT, custom), "vllm")
    assert [each.param for each in found] == [
        "input[0].content[1].image_url", "input[2].output[0].image_url", "input[3].output[0].image_url",
    ]  # fmt: skip
    assert {each.url for each in found} == {"data:x"}
    for none in ({}, {"input": "data:x"}, {"input": {"type": "input_image"}}, request(1, None, [], {})):
        assert images_of(none, "vllm") == []


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_what_is_put_in_their_place(engine: Engine) -> None:
    marked = {"image_url": {"url": "data:x"}, "uuid": "mine", "image_embeds": "y", "cache": 1}
    body = request(user(IMAGE, {"type": "input_text", "text": "t"}, marked)) | {"other": [1.5]}
    members = {"image_embeds": {"grid": [1, 4, 4]}, "uuid": "u"}
    sent = json.loads(b"".join(filled(cut(body, images_of(body, engine), "input_image"), [members] * 2)))
    first, _, second = sent["input"][0]["content"]
    assert first == {"type": "input_image", "detail": "low"} | members
    assert second == {"type": "input_image", "detail": "auto", "cache": 1} | members
    assert sent["other"] == [1.5]


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"role": "assistant", "content": [IMAGE]}, "input[0].content[0].image_url"),
        ({"role": "system", "content": [IMAGE]}, "input[0].content[0].image_url"),
        ({"role": "developer", "content": [IMAGE]}, "input[0].content[0].image_url"),
        ({"role": ["user"], "content": [IMAGE]}, "input[0].content[0].image_url"),
        ({"content": [IMAGE]}, "input[0].content[0].image_url"),
        ({"role": "user", "content": IMAGE}, "input[0].content.image_url"),
        (user({"type": "group", "content": [IMAGE]}), "input[0].content[0].content[0].image_url"),
        ({"type": "reasoning", "role": "user", "content": [IMAGE]}, "input[0].content[0].image_url"),
        ({"type": "computer_call_output", "output": IMAGE}, "input[0].output.image_url"),
        (
            {"type": "computer_call_output", "output": {"type": "computer_screenshot", "image_url": "data:x"}},
            "input[0].output.image_url",
        ),
        (IMAGE, "input[0].image_url"),
        ([[IMAGE]], "input[0][0][0].image_url"),
        ({"role": "user", "content": {"content": IMAGE}}, "input[0].content.content.image_url"),
    ],
)
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_images_in_other_places_are_refused(item: Json, param: str, engine: Engine) -> None:
    with pytest.raises(ApiError, match=f"{engine} takes no image here") as caught:
        images_of(request(item), engine)
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, "unsupported_image", param)


def test_sglang_takes_no_images_of_tools() -> None:
    with pytest.raises(ApiError, match="sglang takes no image here"):
        images_of(request(OUTPUT), "sglang")


@pytest.mark.parametrize(
    "part",
    [
        {"type": "input_image"},
        {"type": "input_image", "image_url": None},
        {"type": "input_image", "image_url": ""},
        {"type": "input_image", "image_url": ["data:x"]},
        {"type": "input_image", "image_url": {"uri": "data:x"}},
        {"type": "input_image", "file_id": "f"},
        {"type": "input_image", "image_embeds": "x", "uuid": "u"},
        {"type": "image", "source": {}},
    ],
)
def test_malformed_images(part: Json) -> None:
    with pytest.raises(ApiError) as caught:
        images_of(request(user(part)), "vllm")
    assert caught.value.status == 400
    assert "input[0].content[0].image_url" in str(caught.value)


def test_too_many_images() -> None:
    api = RequestForm(lambda body: images_of(body, "vllm"))
    with pytest.raises(ApiError, match=r"the request has 2 images, the limit is 1 \(--max-images\)") as caught:
        cut_request(json.dumps(request(user(IMAGE, IMAGE))).encode(), None, Limits(1, 100), api, "input_image")
    assert caught.value.param == "input"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from(["user", "data:x", "input_image", "message", ""]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "role", "content", "output", "source", "image_url", "file_id", "input", "x"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=20,
)


@given(st.lists(JSON), st.sampled_from(["vllm", "sglang"]))
def test_anything_else_is_no_crash(items: list[Any], engine: Engine) -> None:
    body = request(*items)
    try:
        found = images_of(body, engine)
    except ApiError:
        return
    sent = b"".join(filled(cut(body, found, "input_image"), [{"image_url": "data:y"}] * len(found)))
    assert sum(1 for _ in image_parts(json.loads(sent)["input"], ("input",))) == len(found)


def test_deep_nests_are_searched_in_bounded_time_and_memory() -> None:
    nest: Any = [[]] * 20_000
    for _ in range(900):
        nest = {"content": nest}
    assert images_of(request(nest), "vllm") == []


@pytest.mark.parametrize("part", [{"type": "video_url", "video_url": {"url": "https://x"}}, {"video_url": "https://x"}])
def test_clips_are_refused_unless_the_engine_is_to_fetch_them(part: Json) -> None:
    body = request(user(IMAGE, part))
    assert len(images_of(body, "sglang")) == 1
    with pytest.raises(
        ApiError, match=r"^input\[0\].content\[1\].video_url: clips are supported in /v1/chat"
    ) as caught:
        images_of(body, "sglang", with_clips=True)
    assert caught.value.code == "unsupported_clip"
