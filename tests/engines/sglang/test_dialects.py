"""Requests for responses and messages as the router sends them, read by SGLang's own models and converters."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from sglang.srt.entrypoints.anthropic.serving import AnthropicServing
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, ResponsesRequest
from sglang.srt.entrypoints.openai.serving_responses import OpenAIServingResponses
from sglang.srt.parser.jinja_template_utils import process_content_for_template_format

from vitwire_gateway.anthropic import messages
from vitwire_gateway.openai import responses
from vitwire_gateway.requests.filling import Hole, cut, filled
from vitwire_gateway.requests.image_refs import ImageRef

Json = dict[str, Any]
FILE = "iVBORw0KGgo="
URI = f"data:image/png;base64,{FILE}"
SOURCE = {"type": "base64", "media_type": "image/png", "data": FILE}


def sent(request: Json, refs: list[ImageRef], hole: Hole, members: Json) -> Json:
    """The request with these members in the place of each image's, as the router sends it."""
    body: Json = json.loads(b"".join(filled(cut(request, refs, hole), [members] * len(refs))))
    return body


def urls(request: ChatCompletionRequest) -> list[str]:
    """Of the images that SGLang passes on to its encoder, by its own reading of chat requests."""
    found: list[Any] = []
    for message in request.messages:
        process_content_for_template_format(message.model_dump(), "openai", found, [], [], [])
    return [each.url for each in found]


def of_responses(body: Json, *, supports_inline_system: bool = False) -> ChatCompletionRequest:
    """The chat request that SGLang makes of one for a response."""
    serving = OpenAIServingResponses.__new__(OpenAIServingResponses)
    serving.tool_call_parser, serving.supports_inline_system = None, supports_inline_system
    parsed = ResponsesRequest.model_validate(body)
    return ChatCompletionRequest(model="m", messages=serving._construct_input_messages(parsed))


def of_messages(body: Json) -> ChatCompletionRequest:
    """The chat request that SGLang makes of one for a message."""
    serving = AnthropicServing(SimpleNamespace(supports_inline_system=False))
    return serving._convert_to_chat_completion_request(AnthropicMessagesRequest.model_validate(body))


IMAGE = {"type": "input_image", "image_url": "https://example.com/cat.png"}


def test_clips_of_responses_would_be_fetched() -> None:
    """The reason for which the router refuses them."""
    clip = {"type": "video_url", "video_url": {"url": "https://example.com/clip.mp4"}}
    read = of_responses({"model": "m", "input": [{"role": "user", "content": [clip]}]})
    assert read.messages[-1].content[0].video_url.url == "https://example.com/clip.mp4"


@pytest.mark.parametrize("part", [IMAGE, IMAGE | {"detail": "low"}, {"image_url": {"url": "upload:cat"}}])
def test_responses_carry_images(part: Json) -> None:
    items = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": [part, IMAGE]}]
    request = {"model": "m", "instructions": "Look.", "input": items}
    body = sent(request, responses.images_of(request, "sglang"), "input_image", {"image_url": URI})
    read = of_responses(body)
    assert urls(read) == [URI, URI]
    assert read.messages[-1].content[0].image_url.detail == part.get("detail", "auto")


@pytest.mark.parametrize(
    "items",
    [
        [{"role": "system", "content": [IMAGE]}],
        [{"role": "developer", "content": [IMAGE]}],
        [{"type": "function_call_output", "call_id": "c", "output": [IMAGE]}],
        [{"type": "custom_tool_call_output", "call_id": "c", "output": [IMAGE]}],
    ],
)
def test_responses_drop_images_in_other_places(items: list[Json]) -> None:
    """So the router refuses them."""
    assert urls(of_responses({"model": "m", "input": items})) == []


BLOCK = {"type": "image", "source": {"type": "url", "url": "https://example.com/cat.png"}, "cache_control": None}
RESULT = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "a"}, BLOCK]}


def message(role: str, *blocks: Json) -> Json:
    return {"model": "m", "max_tokens": 9, "messages": [{"role": role, "content": list(blocks)}]}


@pytest.mark.parametrize(
    "request_", [message("user", BLOCK), message("assistant", BLOCK), message("user", RESULT, BLOCK)]
)
def test_messages_carry_images(request_: Json) -> None:
    refs = messages.images_of(request_)
    assert urls(of_messages(sent(request_, refs, "source", SOURCE))) == [URI] * len(refs)


def test_messages_drop_images_in_other_places() -> None:
    """So the router refuses them."""
    assert urls(of_messages(message("assistant", RESULT))) == []
    assert urls(of_messages(message("user", {"type": "text", "text": "a"}) | {"system": [BLOCK]})) == []


def test_documents_and_files_are_errors() -> None:
    """So the router leaves them to SGLang."""
    with pytest.raises(ValueError, match="input_file"):
        of_responses(
            {"model": "m", "input": [{"role": "user", "content": [{"type": "input_file", "file_data": "AA"}]}]}
        )
    with pytest.raises(ValueError, match="document"):
        of_messages(message("user", {"type": "document", "source": {"type": "text", "data": "t"}}))
