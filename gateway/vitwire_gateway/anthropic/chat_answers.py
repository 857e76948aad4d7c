"""Chat completions of vLLM, and errors, in Anthropic's form: whole, and in parts for streams. Pure functions."""

import json
from uuid import uuid4

from vitwire_gateway.api_errors import ApiError
from vitwire_gateway.bodies import Json

_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
BROKEN = (LookupError, TypeError, ValueError, AttributeError, RecursionError)
"""Raised while an answer is read that is none."""


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


def error_message_of(status: int, message: str) -> Json:
    """An error with the type that Anthropic has for the status."""
    kind = _ERROR_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def translated_error(status: int, body: bytes) -> Json:
    """An error of the engine, in OpenAI's form or any other."""
    try:
        message = json.loads(body)["error"]["message"]
    except BROKEN:
        message = body[:500].decode("utf-8", "replace")
    return error_message_of(
        status, message if isinstance(message, str) and message else f"the engine answered with {status}"
    )


def head_of(completion: Json) -> Json:
    """The fields of a message that has no content yet."""
    return {
        "id": completion["id"], "type": "message", "role": "assistant", "content": [], "model": completion["model"],
        "stop_reason": None, "stop_sequence": None, "usage": usage_of(completion.get("usage")),
    }  # fmt: skip


def tool_use(call: Json) -> Json:
    """A call of a tool, without its input."""
    return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": {}}


def usage_of(usage: Json | None) -> Json:
    """Counts of tokens; Anthropic's input tokens leave out cached ones."""
    usage = usage or {}
    details = usage.get("prompt_tokens_details") or {}
    names = {"cached_tokens": "cache_read_input_tokens", "created_cache_tokens": "cache_creation_input_tokens"}
    cached = {names[each]: details[each] for each in names if details.get(each) is not None}
    read = max(0, usage.get("prompt_tokens", 0) - sum(cached.values()))
    return {"input_tokens": read, "output_tokens": usage.get("completion_tokens") or 0} | cached


def stop_of(finish: str | None, matched: object, *, called: bool, is_whole: bool) -> Json:
    """Why the model stopped. is_whole: all calls of tools are complete, so a matched text has cut off none."""
    reason, sequence = None, None
    if finish == "length":
        reason = "max_tokens"
    elif finish in ("stop", "tool_calls"):
        if isinstance(matched, str) and not is_whole:
            reason, sequence = "stop_sequence", matched
        else:
            reason = "tool_use" if called or finish == "tool_calls" else "end_turn"
    return {"stop_reason": reason, "stop_sequence": sequence}


def event_of(content: Json) -> bytes:
    """An event of a stream, whose name is its content's type."""
    return f"event: {content['type']}\ndata: ".encode() + encoded(content) + b"\n\n"


def encoded(content: Json) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode()
