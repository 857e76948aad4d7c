"""Streamed chat completions of vLLM as events of a message. Pure functions and a state machine."""

import json
from collections.abc import Iterable, Iterator
from uuid import uuid4

from vitwire_gateway.anthropic.chat_answers import (
    BROKEN,
    encoded,
    error_message_of,
    event_of,
    head_of,
    stop_of,
    tool_use,
    translated_error,
    usage_of,
)
from vitwire_gateway.api_errors import ApiError
from vitwire_gateway.bodies import Json

_MAX_VALUES = 2000
"""Values in the translated fields of a large event; strings count as one."""
_SHORT = 64 << 10
"""Characters of a call's arguments that are read, in 10 ms at most, to see whether they are complete."""


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
        self._later = list[str]()
        """Text that came between the pieces of a tool call."""
        self._calls: dict[int, str] = {}
        self._arguments = ""
        """Arguments of the latest call, their beginning if they are long."""
        self._finish: tuple[str | None, object] = "stop", None
        self._usage: Json | None = None

    def texts(self, content: bytes) -> list[bytes]:
        """The data of the events that end in these bytes of the engine's stream. Raises ApiError for a longer one."""
        if self._is_over:
            return []
        first, *rest = content.split(b"\n")
        self._line += first
        found = []
        for each in rest:
            line, self._line = self._line, bytearray(each)
            if line.startswith(b"data:"):
                found.append(bytes(line[5:]).strip())
        if len(self._line) > self._most:
            raise ApiError(502, f"the engine sent an event of more than {self._most} bytes", "engine_failed")
        return found

    def following(self, text: bytes) -> bytes:
        """The events that follow from the data of one. Raises ApiError if it is not an event."""
        return b"" if self._is_over else _joined(self._of(text))

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
        try:
            if text == b"[DONE]":
                yield from self._stopped()
                yield {"type": "message_stop"}
                self._is_over = True
                return
            chunk = json.loads(text)
            if "error" in chunk:
                self._is_over = True
                yield from self._closed()
                yield translated_error(_status(chunk["error"]), text)
            else:
                yield from self._chunk(chunk)
        except BROKEN as error:
            raise _broken_stream(error) from error

    def _chunk(self, chunk: Json) -> Iterator[Json]:
        if not self._has_begun:
            self._has_begun = True
            yield {"type": "message_start", "message": head_of(chunk)}
        self._usage = chunk.get("usage") or self._usage
        if not chunk["choices"]:
            return
        choice = chunk["choices"][0]
        if choice.get("finish_reason") is not None:
            self._finish = choice["finish_reason"], choice.get("stop_reason")
        delta = choice["delta"]
        if thought := delta.get("reasoning"):
            yield from self._piece("thinking", thought)
        if text := delta.get("content"):
            if self._open and self._open["type"] == "tool_use":
                self._later.append(text)
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
                yield self._started(tool_use(call))
                self._arguments, is_open = "", True
        if is_open and name is not None and function.get("arguments"):
            if len(self._arguments) <= _SHORT:
                self._arguments += function["arguments"]
            yield self._delta({"type": "input_json_delta", "partial_json": function["arguments"]})

    def _stopped(self) -> Iterator[Json]:
        """The end of the last block, and the reason for it."""
        yield from self._flushed()
        is_whole = bool(self._calls) and len(self._arguments) <= _SHORT and _is_json(self._arguments)
        stop = stop_of(self._finish[0], self._finish[1], called=bool(self._calls), is_whole=is_whole)
        yield {"type": "message_delta", "delta": stop, "usage": usage_of(self._usage)}

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
            text, self._later = "".join(self._later), []
            yield from self._piece("text", text)
            yield from self._closed()


def _joined(events: Iterable[Json]) -> bytes:
    return b"".join(event_of(each) for each in events)


def _status(error: object) -> int:
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) and 400 <= code < 600 else 500


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def shortened(text: bytes) -> bytes:
    """The data of a streamed event, with only the fields that are translated.

    Raises ApiError if it is not an event, or has too many values in these fields.
    """
    try:
        event = json.loads(text)
        kept = {name: event[name] for name in ("error", "id", "model", "choices", "usage") if name in event}
        if kept.get("choices"):
            choice = kept["choices"][0]
            delta = {name: choice["delta"].get(name) for name in ("reasoning", "content", "tool_calls")}
            kept["choices"] = [{name: choice.get(name) for name in ("finish_reason", "stop_reason")} | {"delta": delta}]
        if (count := _count(kept)) > _MAX_VALUES:
            raise ValueError(f"an event has {count} values, the limit is {_MAX_VALUES}")
        return encoded(kept)
    except BROKEN as error:
        raise _broken_stream(error) from error


def _count(value: object) -> int:
    """The values in a value, and itself."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(map(_count, inner))


def _broken_stream(error: Exception) -> ApiError:
    return ApiError(502, f"the engine's stream cannot be translated: {error}", "engine_failed")
