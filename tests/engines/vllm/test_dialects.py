"""Requests for responses and messages as the router sends them, read by vLLM's own models and converters."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages, DisabledThinkingEffortResolver
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatCompletionStreamResponse,
)
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.utils import construct_input_messages
from vllm.entrypoints.serve.engine.protocol import ErrorInfo, ErrorResponse
from vllm.exceptions import VLLMValidationError
from vllm.renderers import ChatParams
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.input_processor import InputProcessor

from vitwire import Embedding, Model, Report
from vitwire.integrations.vllm import image_part, reference_part
from vitwire_gateway.anthropic.chat_answers import message_of, translated_error
from vitwire_gateway.anthropic.chat_requests import chat_request
from vitwire_gateway.anthropic.message_events import MessageEvents
from vitwire_gateway.openai import chat, responses
from vitwire_gateway.requests.filling import cut, filled

Json = dict[str, Any]
GRID = (1, 4, 8)


@pytest.fixture(scope="module")
def inline_frontend(checkpoint: Path) -> InputProcessor:
    limits = {"image": 0, "video": 0}
    arguments = EngineArgs(
        str(checkpoint), max_model_len=512, enforce_eager=True, enable_mm_embeds=True, limit_mm_per_prompt=limits
    )
    return InputProcessor(arguments.create_engine_config())


def embedding(model: Model) -> Embedding:
    stored = np.random.default_rng(3).integers(0, 0x3F80, (8, model.embedding_width)).astype("<u2")
    return Embedding(stored, "bfloat16", model.deepstack_levels, Report(), GRID)


def sent(request: Json, part: Json) -> Json:
    """The request for a response with a part in the place of each image, as the router sends it."""
    refs = responses.images_of(request, "vllm")
    members = {name: value for name, value in part.items() if name != "type"}
    body: Json = json.loads(b"".join(filled(cut(request, refs, "input_image"), [members] * len(refs))))
    return body


def read(frontend: InputProcessor, body: Json) -> Any:
    """The request that vLLM's engine gets for the body of /v1/responses."""
    parsed = ResponsesRequest.model_validate(body)
    messages = construct_input_messages(request_instructions=parsed.instructions, request_input=parsed.input)
    (_,), (prompt,) = frontend.renderer.render_chat([messages], ChatParams())
    return frontend.process_inputs("request", prompt, SamplingParams(), ("generate",))


IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AA=="}
CALL = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
INPUTS = [
    [{"role": "user", "content": [{"type": "input_text", "text": "What?"}, IMAGE | {"detail": "high"}]}],
    [{"role": "developer", "content": "Be kind."}, {"type": "message", "role": "user", "content": [IMAGE]}],
    [{"role": "user", "content": "Look"}, CALL, {"type": "function_call_output", "call_id": "c1", "output": [IMAGE]}],
    [
        {"role": "user", "content": "Look"}, CALL,
        {"type": "custom_tool_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "a"}, IMAGE]},
    ],
]  # fmt: skip


@pytest.mark.parametrize("items", INPUTS)
def test_responses_carry_embeddings(inline_frontend: InputProcessor, model: Model, items: list[Json]) -> None:
    expected = embedding(model)
    body = sent({"model": "m", "input": items, "instructions": "Be brief."}, image_part(expected, model, uuid="cat"))
    (feature,) = read(inline_frontend, body).mm_features
    assert feature.identifier == "cat"
    assert torch.equal(feature.data.get_data()["image_embeds"], expected.torch())


@pytest.mark.parametrize("items", INPUTS)
def test_responses_carry_references(frontend: InputProcessor, model: Model, items: list[Json]) -> None:
    body = sent({"model": "m", "input": items}, reference_part(GRID, model, "cat"))
    (feature,) = read(frontend, body).mm_features
    assert (feature.identifier, feature.data.get_data()["image_grid_thw"].tolist()) == ("cat", list(GRID))


def test_responses_drop_images_of_assistants() -> None:
    """So the router refuses them."""
    items = [{"role": "assistant", "content": [{"type": "input_text", "text": "a"}, IMAGE]}]
    parsed = ResponsesRequest.model_validate({"model": "m", "input": items})
    assert construct_input_messages(request_input=parsed.input) == [{"role": "assistant", "content": "a"}]


def test_messages_take_no_embeddings() -> None:
    """So the router translates them."""
    block = {"type": "image", "source": {"type": "image_embeds", "image_embeds": "AA"}, "uuid": "u"}
    request = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": [block]}]}
    assert b"embeds" not in converted(request).model_dump_json().encode()


def test_documents_and_files_are_errors(inline_frontend: InputProcessor) -> None:
    """So the router leaves them to vLLM."""
    part = {"type": "input_file", "file_data": "AA"}
    with pytest.raises(VLLMValidationError, match="input_file"):
        read(inline_frontend, {"model": "m", "input": [{"role": "user", "content": [part]}]})
    document = {"type": "document", "source": {"type": "text", "data": "t"}}
    with pytest.raises(ValueError, match="document"):
        converted({"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": [document]}]})


SOURCE = {"type": "base64", "media_type": "image/png", "data": "AA=="}
CAT = {"type": "image", "source": SOURCE, "cache_control": {"type": "ephemeral"}}
TEXT = {"type": "text", "text": "What is it?"}
TOOL = {"name": "look", "description": "Looks", "input_schema": {"properties": {}}, "strict": True}
CONVERSATION = [
    {"role": "user", "content": [{"type": "text", "text": ""}, TEXT, CAT]},
    {"role": "system", "content": "Between."},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Hm", "signature": "s"},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": "é"}},
            {"type": "tool_use", "id": "t2", "name": "look", "input": {}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "Here"},
            {"type": "tool_result", "tool_use_id": "t1", "content": [TEXT, CAT, TEXT], "is_error": True},
            {"type": "tool_result", "tool_use_id": "t2", "content": "plain"},
        ],
    },
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t2"}]},
    {"role": "assistant", "content": [CAT]},
    {"role": "user", "content": "And?"},
]
REQUESTS = [
    {},
    {"system": "Be brief."},
    {"system": [{"type": "text", "text": "x-anthropic-billing-header: 1"}, TEXT, TEXT], "messages": CONVERSATION},
    {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "stop_sequences": ["a", "b"], "metadata": {"user_id": "u"}},
    {"stream": True, "cache_salt": "salt", "vllm_xargs": {"a": 1}, "chat_template_kwargs": {"b": 2}},
    {"tools": [TOOL]},
    *({"tools": [TOOL], "tool_choice": {"type": kind}} for kind in ("auto", "any", "none")),
    {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "look", "disable_parallel_tool_use": True}},
    {"thinking": {"type": "enabled", "budget_tokens": 1024, "display": "omitted"}, "max_tokens": 2048},
    {"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}},
    {
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "max", "format": {"type": "json_schema", "schema": {"type": "object"}}},
    },
]


def converted(request: Json) -> ChatCompletionRequest:
    """The chat request that vLLM makes of a request for a message, for a template that takes one system message."""
    parsed = AnthropicMessagesRequest.model_validate(request)
    made = AnthropicServingMessages.to_chat_completion_request(parsed, merge_inline_system=True)
    return ChatCompletionRequest.model_validate(made.model_dump(exclude_none=True, exclude_unset=True))


@pytest.mark.parametrize("fields", REQUESTS)
def test_messages_become_the_chat_requests_that_vllm_makes(fields: Json) -> None:
    request = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": [CAT, TEXT]}]} | fields
    ours = chat_request(json.loads(json.dumps(request)))
    for ref in chat.images_of(ours):
        part: Any = ours
        for key in ref.path[:-1]:
            part = part[key]
        part["image_url"]["url"] = "data:image/png;base64,AA=="  # in place of its name
    mine, theirs = ChatCompletionRequest.model_validate(ours).model_dump(), converted(request).model_dump()
    mine.pop("request_id", None), theirs.pop("request_id", None)
    assert json.dumps(mine, default=list, sort_keys=True) == json.dumps(theirs, default=list, sort_keys=True)


def test_thinking_that_is_disabled_is_no_effort_by_default() -> None:
    resolver = DisabledThinkingEffortResolver(None, "none")  # the renderer is asked only with "auto"
    request = AnthropicMessagesRequest.model_validate(
        {"model": "m", "max_tokens": 9, "messages": [], "thinking": {"type": "disabled"}}
    )
    assert asyncio.run(resolver.resolve_for(request)) == "none"


USAGE = {"prompt_tokens": 30, "completion_tokens": 5, "total_tokens": 35}
CACHED = USAGE | {"prompt_tokens_details": {"cached_tokens": 16}}


def tool_call(name: str, arguments: str, index: int = 0) -> Json:
    return {
        "index": index,
        "id": f"call-{name}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


MESSAGES = [
    ({"content": "Two cats"}, "stop", None, USAGE),
    ({"content": "Two"}, "stop", " cats", CACHED),
    ({"content": "Two"}, "length", None, CACHED),
    ({"content": None}, "stop", 7, USAGE),
    ({"content": "Hi", "reasoning": "Hm"}, "stop", None, USAGE),
    ({"content": "", "tool_calls": [tool_call("look", '{"a": 1}'), tool_call("see", "{}")]}, "tool_calls", None, USAGE),
    ({"content": None, "tool_calls": [tool_call("look", "{}")]}, "stop", "END", USAGE),
    ({"content": "x"}, "abort", None, USAGE),
]


def converter() -> AnthropicServingMessages:
    return AnthropicServingMessages.__new__(AnthropicServingMessages)  # its converters use no state


def plain(content: Any) -> Any:
    """Without what is null, and with one signature for all: they are random."""
    if isinstance(content, list):
        return [plain(each) for each in content]
    if isinstance(content, dict):
        return {name: "s" if name == "signature" else plain(each) for name, each in content.items() if each is not None}
    return content


@pytest.mark.parametrize(("message", "finish", "stop", "usage"), MESSAGES)
def test_answers_are_those_of_vllm(message: Json, finish: str, stop: Any, usage: Json) -> None:
    choice = {"index": 0, "message": {"role": "assistant"} | message, "finish_reason": finish, "stop_reason": stop}
    completion = ChatCompletionResponse.model_validate({"id": "c1", "model": "m", "choices": [choice], "usage": usage})
    theirs = converter().messages_full_converter(completion).model_dump(exclude_none=True)
    assert plain(message_of(completion.model_dump_json().encode())) == plain(theirs)


def chunks(*deltas: Json, finish: str = "stop", stop: Any = None, usage: Json = USAGE) -> list[Json]:
    """A stream as vLLM's chat completions send it."""
    choices = [[{"index": 0, "delta": delta}] for delta in ({"role": "assistant", "content": ""}, *deltas)]
    choices.append([{"index": 0, "delta": {"content": ""}, "finish_reason": finish, "stop_reason": stop}])
    counted = {"prompt_tokens": 30, "completion_tokens": 0, "total_tokens": 30}
    found: list[Json] = [{"id": "c1", "model": "m", "choices": each, "usage": counted} for each in choices]
    return [*found, {"id": "c1", "model": "m", "choices": [], "usage": usage}]


def piece(arguments: str, index: int = 0) -> Json:
    return {"tool_calls": [{"index": index, "function": {"arguments": arguments}}]}


def first(name: str, index: int = 0, arguments: str = "") -> Json:
    return {"tool_calls": [tool_call(name, arguments, index)]}


STREAMS = {
    "text": chunks({"content": "Two"}, {"content": " cats"}, usage=CACHED),
    "nothing": chunks(),
    "length": chunks({"content": "Two"}, finish="length"),
    "stop text": chunks({"content": "Two"}, stop="END"),
    "thinking": chunks({"reasoning": "H"}, {"reasoning": "m"}, {"reasoning": "", "content": "Hi"}),
    "thinking and text at once": chunks({"reasoning": "H", "content": "Hi"}),
    "calls": chunks(
        {"content": "I look"}, first("look"), piece('{"a":'), piece("1}"), first("see", 1, "{}"), finish="tool_calls"
    ),
    "two calls at once": chunks(
        {"tool_calls": [tool_call("look", "{}"), tool_call("see", '{"b"', 1)]}, piece(": 2}", 1), finish="tool_calls"
    ),
    "text in a call": chunks(first("look"), {"content": "\n"}, piece("{}"), {"content": "x"}, finish="tool_calls"),
    "text between calls": chunks(first("look", 0, "{}"), {"content": "then"}, first("see", 1, "{}"), finish="stop"),
    "a call cut off": chunks(first("look"), piece('{"a'), finish="stop", stop="END"),
    "a whole call before a stop text": chunks(first("look"), piece("{}"), finish="stop", stop="END"),
}


async def stream_of_vllm(given: list[Any]) -> list[Json]:
    async def generated() -> AsyncIterator[Any]:
        for each in given:
            is_error = isinstance(each, ErrorResponse)
            yield each if is_error else ChatCompletionStreamResponse.model_validate(each)

    return [event async for text in converter().message_stream_converter(generated()) for event in events(text)]


def events(text: str) -> list[Json]:
    found = []
    for each in filter(None, text.split("\n\n")):
        name, content = (line.partition(": ")[2] for line in each.split("\n"))
        found.append(json.loads(content))
        assert found[-1]["type"] == name
    return found


def fed(events: MessageEvents, content: bytes) -> bytes:
    return b"".join(map(events.following, events.texts(content)))


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("size", [1, 7, 1 << 20])
def test_streams_are_those_of_vllm(name: str, size: int) -> None:
    dumped = [ChatCompletionStreamResponse.model_validate(each) for each in STREAMS[name]]
    text = "".join(f"data: {each.model_dump_json(exclude_unset=True)}\n\n" for each in dumped) + "data: [DONE]\n\n"
    content, translated = text.encode(), MessageEvents(1 << 20)
    ours = b"".join(fed(translated, content[at : at + size]) for at in range(0, len(content), size))
    ours += translated.ended()
    assert plain(events(ours.decode())) == plain(asyncio.run(stream_of_vllm(STREAMS[name])))


@pytest.mark.parametrize("code", [400, 404, 500, 503])
def test_errors_are_those_of_vllm(code: int) -> None:
    error = ErrorResponse(error=ErrorInfo(message="no embedding", type="x", code=code))
    given = chunks({"reasoning": "H"})[:2]
    dumped = [ChatCompletionStreamResponse.model_validate(each).model_dump_json(exclude_unset=True) for each in given]
    translated = MessageEvents(1 << 20)
    text = "".join(f"data: {each}\n\n" for each in [*dumped, error.model_dump_json()]) + "data: [DONE]\n\n"
    ours = events((fed(translated, text.encode()) + translated.ended()).decode())
    assert plain(ours) == plain(asyncio.run(stream_of_vllm([*given, error])))
    assert translated_error(code, error.model_dump_json().encode()) == ours[-1]
