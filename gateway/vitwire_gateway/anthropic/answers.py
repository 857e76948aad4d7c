"""Chat completions of vLLM as answers in Anthropic's form, plain and streamed. Pure functions."""

import json
from collections.abc import Iterable, Iterator
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
_BROKEN = (LookupError, TypeError, ValueError, AttributeError, RecursionError)
"""Raised while an answer is read that is none."""


def error_message_of(status: int, message: str) -> Json:
    """An error with the type that Anthropic has for the status."""
    kind = _ERROR_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def translated_error(status: int, body: bytes) -> Json:
    """An error of the engine, in OpenAI's form or any other."""
    try:
        message = json.loads(body)["error"]["message"]
    except _BROKEN:
        message = body[:500].decode("utf-8", "replace")
    return error_message_of(
        status, message if isinstance(message, str) and message else f"the engine answered with {status}"
    )


def answer_of(body: bytes, status: int) -> bytes:
    """A chat completion, or an error by its status, as JSON in Anthropic's form. Raises ApiError."""
    return encoded(message_of(body) if status == 200 else translated_error(status, body))


def message_of(body: bytes) -> Json:
    """The message of a chat completion. Raises ApiError if it is none."""
    try:
        return _message(json.loads(body))
    except _BROKEN as error:
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
    content += [_tool_use(each) | {"input": json.loads(each["function"]["arguments"])} for each in calls]
    reason = _stop(choice.get("finish_reason"), choice.get("stop_reason"), called=bool(calls), is_whole=bool(calls))
    head = _head(completion) | {"content": content or [{"type": "text", "text": ""}]}
    passed = {name: completion[name] for name in ("kv_transfer_params", "ec_transfer_params") if completion.get(name)}
    return head | reason | {"usage": _usage(completion.get("usage"))} | passed


def _head(completion: Json) -> Json:
    return {
        "id": completion["id"], "type": "message", "role": "assistant", "content": [], "model": completion["model"],
        "stop_reason": None, "stop_sequence": None, "usage": _usage(completion.get("usage")),
    }  # fmt: skip


def _tool_use(call: Json) -> Json:
    return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": {}}


def _usage(usage: Json | None) -> Json:
    """Counts of tokens; Anthropic's input tokens leave out cached ones."""
    usage = usage or {}
    details = usage.get("prompt_tokens_details") or {}
    names = {"cached_tokens": "cache_read_input_tokens", "created_cache_tokens": "cache_creation_input_tokens"}
    cached = {names[each]: details[each] for each in names if details.get(each) is not None}
    read = max(0, usage.get("prompt_tokens", 0) - sum(cached.values()))
    return {"input_tokens": read, "output_tokens": usage.get("completion_tokens") or 0} | cached


def _stop(finish: str | None, matched: object, *, called: bool, is_whole: bool) -> Json:
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


class MessageEvents:
    """Turns the events of a streamed chat completion into events of a message."""

    def __init__(self, most: int) -> None:
        """most: bytes of one event."""
        self._most = most
        self._line = bytearray()
        self._has_begun = False
        self._is_over = False
        self._index = -1
        self._open: Json | None = None
        """The block that gets the next text."""
        self._later = ""
        """Text that came between the pieces of a tool call."""
        self._calls: dict[int, str] = {}
        self._arguments = ""
        """Of the latest call."""
        self._finish: tuple[str | None, object] = "stop", None
        self._has_stopped = False
        self._usage: Json | None = None

    def fed(self, content: bytes) -> bytes:
        """The events that follow from these bytes of the engine's stream. Raises ApiError for what is no event."""
        first, *rest = content.split(b"\n")
        self._line += first
        events = bytearray()
        for each in rest:
            line, self._line = self._line, bytearray(each)
            if line.startswith(b"data:") and not self._is_over:
                events += _joined(self._of(bytes(line[5:]).strip()))
        if len(self._line) > self._most:
            raise ApiError(502, f"the engine sent an event of more than {self._most} bytes", "engine_failed")
        return bytes(events)

    def ended(self) -> bytes:
        """The events for the end of the engine's stream: none if it was complete."""
        if self._is_over:
            return b""
        return self.failed(ApiError(502, "the engine's stream ended before its answer", "engine_failed"))

    def failed(self, error: ApiError) -> bytes:
        """The events for a stream that breaks off."""
        self._is_over = True
        return _joined([*self._closed(), error_message_of(error.status, error.message)])

    def _of(self, text: bytes) -> Iterator[Json]:
        if text == b"[DONE]":
            self._is_over = True
            yield from self._stopped()
            yield {"type": "message_stop"}
            return
        try:
            chunk = json.loads(text)
            if "error" in chunk:
                self._is_over = True
                yield from self._closed()
                yield translated_error(_status(chunk["error"]), text)
            else:
                yield from self._chunk(chunk)
        except _BROKEN as error:
            raise ApiError(502, f"the engine's stream cannot be translated: {error}", "engine_failed") from error

    def _chunk(self, chunk: Json) -> Iterator[Json]:
        if not self._has_begun:
            self._has_begun = True
            yield {"type": "message_start", "message": _head(chunk)}
        self._usage = chunk.get("usage") or self._usage
        if not chunk["choices"]:
            yield from self._stopped()
            return
        choice = chunk["choices"][0]
        if choice.get("finish_reason") is not None:
            self._finish = choice["finish_reason"], choice.get("stop_reason")
        delta = choice["delta"]
        if thought := delta.get("reasoning"):
            yield from self._piece("thinking", thought)
        if text := delta.get("content"):
            if self._open and self._open["type"] == "tool_use":
                self._later += text
            else:
                yield from self._piece("text", text)
        for call in delta.get("tool_calls") or []:
            yield from self._call(call)

    def _piece(self, kind: str, text: str) -> Iterator[Json]:
        if not self._open or self._open["type"] != kind:
            yield from self._flushed()
            yield self._started({"type": kind, kind: ""})
        yield self._delta({"type": f"{kind}_delta", kind: text})

    def _call(self, call: Json) -> Iterator[Json]:
        function = call.get("function") or {}
        name = call.get("id") or self._calls.get(call["index"])
        is_open = self._open is not None and self._open.get("id") == name
        if call.get("id") is not None:
            self._calls[call["index"]] = call["id"]
            if not is_open and function.get("name") is not None:
                yield from self._flushed()
                yield self._started(_tool_use(call))
                self._arguments, is_open = "", True
        if is_open and name is not None and function.get("arguments"):
            self._arguments += function["arguments"]
            yield self._delta({"type": "input_json_delta", "partial_json": function["arguments"]})

    def _stopped(self) -> Iterator[Json]:
        """The end of the last block, and once the reason for it."""
        yield from self._flushed()
        if not self._has_stopped:
            self._has_stopped = True
            is_whole = bool(self._calls) and _is_json(self._arguments)
            stop = _stop(self._finish[0], self._finish[1], called=bool(self._calls), is_whole=is_whole)
            yield {"type": "message_delta", "delta": stop, "usage": _usage(self._usage)}

    def _started(self, block: Json) -> Json:
        self._index += 1
        self._open = block
        return {"type": "content_block_start", "index": self._index, "content_block": block}

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _closed(self) -> Iterator[Json]:
        """The end of the open block."""
        if self._open:
            if self._open["type"] == "thinking":
                yield self._delta({"type": "signature_delta", "signature": uuid4().hex})
            self._open = None
            yield {"type": "content_block_stop", "index": self._index}

    def _flushed(self) -> Iterator[Json]:
        """The end of the open block, and a block with the text that came late."""
        yield from self._closed()
        if self._later:
            text, self._later = self._later, ""
            yield from self._piece("text", text)
            yield from self._closed()


def _joined(events: Iterable[Json]) -> bytes:
    return b"".join(event_of(each) for each in events)


def event_of(content: Json) -> bytes:
    """An event of a stream, whose name is its content's type."""
    return f"event: {content['type']}\ndata: ".encode() + encoded(content) + b"\n\n"


def encoded(content: Json) -> bytes:
    """The content as JSON."""
    return json.dumps(content, separators=(",", ":")).encode()


def _status(error: object) -> int:
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) and 400 <= code < 600 else 500


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
