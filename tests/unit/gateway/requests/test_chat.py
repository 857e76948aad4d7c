"""Chat requests: their images, and what is put in their place."""

import json
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitwire.integrations.vllm.tensors import TorchFile, torch_base64
from vitwire_gateway.api_errors import ApiError
from vitwire_gateway.bodies import parse
from vitwire_gateway.requests.chat import images_of
from vitwire_gateway.requests.filling import cut, filled
from vitwire_gateway.requests.image_sources import Limits
from vitwire_gateway.requests.request_reading import CutRequest, cut_request

LIMITS = Limits(8, 100)


def chat(*parts: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": list(parts)}]}


def read(request: Any, limits: Limits = LIMITS, *, with_clips: bool = True) -> CutRequest:
    return cut_request(json.dumps(request).encode(), limits, with_clips=with_clips)


def image(url: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": url}


def rewritten(request: Any, *parts: dict[str, Any]) -> Any:
    return json.loads(b"".join(filled(cut(request, images_of(request)), parts)))


def test_rows_are_encoded_as_the_request_is_sent() -> None:
    first, second = (np.full((3, 1 << 18), value, "<u2") for value in (1, 2))
    request = chat(image("data:x"), {"type": "text", "text": "t"}, image("data:y"))
    files = [TorchFile(each, "bfloat16") for each in (first, second)]
    parts = [{"type": "image_embeds", "image_embeds": {"rows": file, "n": [1, 2]}, "uuid": "u"} for file in files]
    body = filled(cut(request, images_of(request)), parts)
    assert body.held < 1 << 10 < 1 << 20 < len(body)
    sent = list(body)
    assert (max(map(len, sent)) <= 1 << 19, sum(map(len, sent))) == (True, len(body))
    content = json.loads(b"".join(sent))["messages"][1]["content"]
    assert [content[at]["image_embeds"]["rows"] for at in (0, 2)] == [
        torch_base64(each, "bfloat16") for each in (first, second)
    ]
    assert content[2]["image_embeds"]["n"] == [1, 2]
    assert b"".join(body) == b"".join(sent)  # a request that is sent again


@pytest.mark.parametrize(
    "part",
    [
        image({"url": "data:x", "detail": "low"}),
        image("data:x"),
        {"type": "input_image", "image_url": "data:x"},
        {"image_url": {"url": "data:x"}},
        {"type": "text", "image_url": "data:x", "uuid": "u"},  # vLLM reads it as an image
    ],
)
def test_images_are_found_in_every_form(part: dict[str, Any]) -> None:
    (ref,) = images_of(chat({"type": "text", "text": "t"}, part))
    assert (ref.url, ref.param) == ("data:x", "messages[1].content[1].image_url")


@pytest.mark.parametrize(
    ("part", "param", "reason"),
    [
        (image({}), "messages[1].content[0].image_url.url", "string"),
        (image({"url": 5}), "messages[1].content[0].image_url.url", "string"),
        (image({"url": ""}), "messages[1].content[0].image_url.url", "string"),
        (image(None), "messages[1].content[0].image_url", "nothing"),
        (image([]), "messages[1].content[0].image_url", "list"),
        ({"type": "image_url"}, "messages[1].content[0].image_url", "nothing"),
        ({"image_url": None, "uuid": "cached"}, "messages[1].content[0].image_url", "nothing"),
    ],
)
def test_malformed_parts_are_named(part: dict[str, Any], param: str, reason: str) -> None:
    with pytest.raises(ApiError, match=reason) as caught:
        images_of(chat(part))
    assert (caught.value.status, caught.value.param) == (400, param)
    assert json.loads(caught.value.body)["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "request_", [{}, {"messages": "x"}, {"messages": [1, {"content": "x"}, {"content": [1, "x", {"type": "text"}]}]}]
)
def test_what_is_no_image_is_left_to_the_engine(request_: dict[str, Any]) -> None:
    assert images_of(request_) == []


@pytest.mark.parametrize(
    "part",
    [
        {"type": "video_url", "video_url": {"url": "data:x"}},
        {"type": "video_url", "video_url": "data:x", "uuid": "u"},
        {"video_url": {"url": "data:x"}},
        {"type": "text", "video_url": "data:x", "uuid": "u"},  # vLLM reads it as a clip
    ],
)
def test_clips_are_found_in_every_form(part: dict[str, Any]) -> None:
    (ref,) = images_of(chat({"type": "text", "text": "t"}, part), with_clips=True)
    assert (ref.url, ref.param) == ("data:x", "messages[1].content[1].video_url")
    assert images_of(chat(part)) == []


@pytest.mark.parametrize(
    ("part", "param", "reason"),
    [
        ({"type": "video_url"}, "messages[1].content[0].video_url", "nothing"),
        ({"video_url": {"url": 5}}, "messages[1].content[0].video_url.url", "string"),
        ({"video_url": ["data:x"]}, "messages[1].content[0].video_url", 'expected {"url": "data:video/..."}, got list'),
    ],
)
def test_malformed_clips_are_named(part: dict[str, Any], param: str, reason: str) -> None:
    with pytest.raises(ApiError, match=re.escape(reason)) as caught:
        images_of(chat(part), with_clips=True)
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, "invalid_clip_url", param)


def test_nothing_of_a_part_can_take_the_place_of_its_embedding() -> None:
    """vLLM reads the first of these fields that a part with a `uuid` has, and names its content by the `uuid`."""
    others = {"image_pil": 1, "audio_embeds": "A", "video_embeds": "V", "image_embeds": "I", "uuid": "u", "kept": 1}
    request = chat({"type": "video_url", "video_url": {"url": "data:x"}} | others)
    pieces = cut(request, images_of(request, with_clips=True))
    changed = json.loads(b"".join(filled(pieces, [{"type": "video_embeds", "video_embeds": "mine", "uuid": "mine"}])))
    (part,) = changed["messages"][1]["content"]
    assert part == {"kept": 1, "type": "video_embeds", "video_embeds": "mine", "uuid": "mine"}


@pytest.mark.parametrize(
    "options",
    [{"mm_processor_kwargs": {"fps": 1}}, {"media_io_kwargs": {"video": {}}}, {"use_audio_in_video": True}],
)
def test_options_of_clips_are_refused(options: dict[str, Any]) -> None:
    """They would silently have no effect."""
    clip = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,QUJD"}}
    with pytest.raises(ApiError, match="by the rule of its model") as caught:
        read(chat(clip) | options)
    assert (caught.value.code, caught.value.param) == ("unsupported_option", next(iter(options)))
    read(chat(image("data:image/png;base64,QUJD")) | options)
    read(chat(clip) | options, with_clips=False)
    read(chat(clip) | {"mm_processor_kwargs": {}, "media_io_kwargs": None})
    clip["video_url"] |= {"detail": None, "fps": 2}
    with pytest.raises(ApiError) as caught:
        read(chat(image("data:,"), clip))
    assert (caught.value.code, caught.value.param) == ("unsupported_option", "messages[1].content[1].video_url.fps")


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"mm_processor_kwargs": [1]}, "mm_processor_kwargs"),
        ({"media_io_kwargs": {"image": {"image_mode": "L"}}}, "media_io_kwargs"),
        ({}, "messages[1].content[0].image_url.max_dynamic_patch"),
    ],
)
def test_options_of_images_are_refused(options: dict[str, Any], param: str) -> None:
    url = {"url": "data:image/png;base64,QUJD", "detail": "high"} | ({} if options else {"max_dynamic_patch": 4})
    with pytest.raises(ApiError, match="no effect on images") as caught:
        read(chat(image(url)) | options)
    assert (caught.value.code, caught.value.param) == ("unsupported_option", param)


SIZE = {"shortest_edge": 4, "longest_edge": 9}


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ({"max_pixels": 9, "fps": 1}, {"max_pixels": 9}),
        ({"size": SIZE, "min_pixels": 5}, {"min_pixels": 5, "max_pixels": 9}),
        ({"min_pixels": None}, {}),
        ({"videos_kwargs": {"size": SIZE}}, {}),
    ],
)
def test_options_that_set_the_size_of_images_are_the_encoders(given: Any, options: dict[str, int]) -> None:
    request = chat(image("data:image/png;base64,QUJD")) | {"mm_processor_kwargs": given}
    found = read(request)
    assert dict(found.images.options) == options
    assert json.loads(b"".join(filled(found.pieces, [{"type": "x"}])))["mm_processor_kwargs"] == given
    clip = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,QUJD"}}
    with pytest.raises(ApiError, match="no effect on clips"):
        read(chat(image("data:image/png;base64,QUJD"), clip) | {"mm_processor_kwargs": given})
    others = {"mm_processor_kwargs": given}
    assert dict(read(chat(image("data:,"), clip) | others, with_clips=False).images.options) == options
    assert not read(chat() | {"mm_processor_kwargs": {"max_pixels": 0}}).images.options


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"max_pixels": 0}, "mm_processor_kwargs.max_pixels"),
        ({"max_pixels": 10**99}, "mm_processor_kwargs.max_pixels"),
        ({"size": {"longest_edge": 9}}, "mm_processor_kwargs.size"),
        ({"max_pixels": 9, "image_mean": [0, 0, 0]}, "mm_processor_kwargs"),
        ({"images_kwargs": {"max_pixels": 9}}, "mm_processor_kwargs"),
        ("max_pixels", "mm_processor_kwargs"),
    ],
)
def test_wrong_options_of_images_are_named(given: Any, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        read(chat(image("data:image/png;base64,QUJD")) | {"mm_processor_kwargs": given})
    assert (caught.value.status, caught.value.param) == (400, param)


def test_one_url_may_be_of_an_image_and_of_a_clip() -> None:
    url = "data:video/mp4;base64,QUJD"
    parts = (image(url), {"type": "video_url", "video_url": {"url": url}}, image(url))
    request = read(chat(*parts))
    assert [place.source for place in request.images.places] == [0, 1, 0]
    assert [source.modality for source in request.images.sources] == ["image", "video"]
    with pytest.raises(ApiError, match="3 images and clips, the limit is 2"):
        read(chat(*parts), limits=LIMITS._replace(max_images=2))


def test_all_else_is_kept() -> None:
    original = chat({"type": "text", "text": "ü\ud800"}, image({"url": "data:x"}) | {"cache_control": 1, "uuid": "u"})
    original |= {"seed": 2**70, "n": 0.1, "x": {"y": [None, True]}}
    request = parse(json.dumps(original).encode())
    (ref,) = images_of(request)
    changed = rewritten(request, {"type": "image_embeds", "image_embeds": "E", "uuid": "mine"})
    expected = json.loads(json.dumps(original))
    expected["messages"][1]["content"][1] = {
        "cache_control": 1, "type": "image_embeds", "image_embeds": "E", "uuid": "mine",
    }  # fmt: skip
    assert changed == expected
    assert images_of(request) == [ref], "the request itself stays as it is"


_NAMES = ("messages", "content", "type", "image_url", "video_url", "url", "uuid", "x")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(_NAMES), inner),
    max_leaves=30,
)


@settings(max_examples=40)
@given(JSON, JSON)
def test_any_json_is_refused_or_kept(content: Any, other: Any) -> None:
    request = parse(json.dumps({"messages": [other, {"content": content}], "other": other}).encode())
    try:
        refs = images_of(request, with_clips=True)
    except ApiError as error:
        assert (error.status, error.param is not None) == (400, True)
        return
    if refs:
        body = b"".join(filled(cut(request, refs), ({"type": "embeds"} for _ in refs)))
        assert images_of(json.loads(body), with_clips=True) == []


def test_numbers_that_json_has_not() -> None:
    request = parse(json.dumps(chat(image("data:x"))).replace('"m"', "1e999").encode())
    with pytest.raises(ApiError, match="cannot be sent"):
        rewritten(request, {})
