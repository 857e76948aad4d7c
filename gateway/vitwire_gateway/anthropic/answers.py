"""Chat completions of vLLM as answers in Anthropic's form. Pure functions."""

import json
from uuid import uuid4

from vitwire_gateway.anthropic.message_parts import (
    BROKEN,
    encoded,
    head_of,
    stop_of,
    tool_use,
    translated_error,
    usage_of,
)
from vitwire_gateway.api_errors import ApiError
from vitwire_gateway.bodies import Json


def answer_of(body: bytes, status: int) -> bytes:
    """A chat completion, or an error by its status, as JSON in Anthropic's form. Raises ApiError."""
    return encoded(message_of(body) if status == 200 else translated_error(status, body))


def message_of(body: bytes) -> Json:
    """The message of a chat completion. Raises ApiError if it is none."""
    try:
        return _message(json.loads(body))
    except BROKEN as error:
        raise ApiError(502, f"the engine's answer cannot be translated: {error}", "engine_failed") from error


def _message(completion: Json) -> Json:
    choice = completion["choices"][0]
    said = choice["message"]
    calls = said.get("tool_calls") or []
    content: list[Json] = []
    if thought := said.get("reasoning"):
        content.append({"type": "thinking", "thinking": thought, "signature": uuid4().hex})
    if text := said.get("content"):
        content.append({"type": "text", "text": text})
    content += [tool_use(each) | {"input": json.loads(each["function"]["arguments"])} for each in calls]
    reason = stop_of(choice.get("finish_reason"), choice.get("stop_reason"), called=bool(calls), is_whole=bool(calls))
    head = head_of(completion) | {"content": content or [{"type": "text", "text": ""}]}
    passed = {name: completion[name] for name in ("kv_transfer_params", "ec_transfer_params") if completion.get(name)}
    return head | reason | {"usage": usage_of(completion.get("usage"))} | passed
