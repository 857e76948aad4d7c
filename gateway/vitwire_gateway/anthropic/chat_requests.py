"""Anthropic requests as chat requests of vLLM, as vLLM's `/v1/messages` converts them. Pure functions.

Fields without effect on the answer are left out; ApiError names any other field that a chat request cannot carry.
"""

import json
from typing import TypeVar

from vitwire_gateway.anthropic.messages import FIELD
from vitwire_gateway.api_errors import invalid
from vitwire_gateway.bodies import Json
from vitwire_gateway.requests.image_refs import Path, param_of

T = TypeVar("T")

_SAME = (
    "model", "temperature", "top_p", "top_k",
    "cache_salt", "chat_template_kwargs", "kv_transfer_params", "vllm_xargs", "watermarking",
)  # fmt: skip
"""Fields that mean the same to chat completions; the engine checks them."""
_TRANSLATED = (
    "max_tokens", "messages", "output_config", "stop_sequences", "stream", "system", "thinking", "tool_choice", "tools",
)  # fmt: skip
_WITHOUT_EFFECT = (
    "cache_control", "metadata", "mm_payload", "return_mm_kwargs", "service_tier", "speed", "user_profile_id",
    "workspace_id",
)  # fmt: skip
_BLOCKS = {
    "image": ("source",),
    "redacted_thinking": ("data",),
    "text": ("text",),
    "thinking": ("thinking", "signature"),
    "tool_result": ("tool_use_id", "content", "is_error"),
    "tool_use": ("id", "name", "input"),
}
"""Fields of each type of block, besides `type` and `cache_control`."""
_TYPES = {
    "user": ("text", "image", "tool_result"),
    "assistant": ("text", "image", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
    "tool_result": ("text", "image"),
}
"""Types of blocks by what they are in."""
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_BILLING = "x-anthropic-billing-header"
"""Begins a text in which some clients report on themselves; it changes with each request."""


def chat_request(request: Json) -> Json:
    """The chat request; the URL of each image is its name in errors. Raises ApiError."""
    known = _fields(request, "", (*_SAME, *_TRANSLATED, *_WITHOUT_EFFECT))
    most = _typed(known.get("max_tokens"), int, "max_tokens")
    chat = {name: known[name] for name in _SAME if name in known}
    chat |= {"max_tokens": most, "max_completion_tokens": most, "messages": _messages(known)}
    if "stop_sequences" in known:
        chat["stop"] = known["stop_sequences"]
    if known.get("stream"):
        chat |= {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    return chat | _output(known) | _thinking(known) | _tools(known)


def _messages(request: Json) -> list[Json]:
    """All messages; system messages are moved to the front, where every chat template takes them."""
    system, turns = [_system(request.get("system"), ("system",))], list[Json]()
    for number, each in enumerate(_typed(request.get("messages"), list, "messages")):
        path: Path = ("messages", number)
        message = _fields(each, param_of(path), ("role", "content"))
        role, content = message.get("role"), message.get("content")
        if role == "system":
            system.append(_system(content, (*path, "content")))
        elif role not in ("user", "assistant"):
            raise invalid("expected user, assistant or system", f"{param_of(path)}.role")
        elif isinstance(content, str):
            turns.append({"role": role, "content": content})
        else:
            turns += _turn(role, content, (*path, "content"))
    text = "".join(system)
    return [{"role": "system", "content": text}, *turns] if text else turns


def _system(content: object, path: Path) -> str:
    if isinstance(content, str | None):
        texts = [content or ""]
    else:
        texts = [block["text"] for _, block in _blocks(content, "system", path)]
    return "".join(each for each in texts if not each.startswith(_BILLING))


def _turn(role: str, content: object, path: Path) -> list[Json]:
    """The message of role user or assistant, after its tool results."""
    results, parts, calls, thoughts = list[Json](), list[Json](), list[Json](), list[str]()
    for place, block in _blocks(content, role, path):
        match block["type"]:
            case "text" if block["text"]:
                parts.append({"type": "text", "text": block["text"]})
            case "image":
                parts.append(_image(place))
            case "thinking":
                thoughts.append(_typed(block.get("thinking"), str, f"{param_of(place)}.thinking"))
            case "tool_use":
                calls.append(_call(block, param_of(place)))
            case "tool_result":
                results += _result(block, place)
    message: Json = {"role": role}
    if thoughts:
        message["reasoning"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    if parts:
        message["content"] = parts[0]["text"] if [each["type"] for each in parts] == ["text"] else parts
    return [*results, message] if role == "assistant" or parts else results


def _call(block: Json, param: str) -> Json:
    try:
        arguments = json.dumps(_typed(block.get("input", {}), dict, f"{param}.input"))
    except RecursionError as error:
        raise invalid("nested too deeply", f"{param}.input") from error
    function = {"name": _typed(block.get("name"), str, f"{param}.name"), "arguments": arguments}
    return {"id": _typed(block.get("id"), str, f"{param}.id"), "type": "function", "function": function}


def _result(block: Json, path: Path) -> list[Json]:
    """The text of a tool's result, and its images as a message of the user: most templates take text from tools."""
    texts, images = list[str](), list[Json]()
    content = block.get("content", "")
    if isinstance(content, str):
        texts.append(content)
    else:
        for place, inner in _blocks(content, "tool_result", (*path, "content")):
            if inner["type"] == "text":
                texts.append(inner["text"])
            else:
                images.append(_image(place))
    name = _typed(block.get("tool_use_id"), str, f"{param_of(path)}.tool_use_id")
    result = {"role": "tool", "tool_call_id": name, "content": "\n".join(texts)}
    return [result, {"role": "user", "content": images}] if images else [result]


def _image(path: Path) -> Json:
    return {"type": "image_url", "image_url": {"url": param_of((*path, FIELD))}}


def _blocks(content: object, holder: str, path: Path) -> list[tuple[Path, Json]]:
    """The blocks of a content, checked, with their paths."""
    found = []
    for number, each in enumerate(_typed(content, list, param_of(path))):
        place = (*path, number)
        kind = _typed(each, dict, param_of(place)).get("type")
        if kind not in _TYPES[holder]:
            names = ", ".join(_TYPES[holder])
            text = f"with images in the request, the content of {holder} takes blocks of type {names}"
            raise invalid(text, f"{param_of(place)}.type", "unsupported_field")
        block = _fields(each, param_of(place), ("type", "cache_control", *_BLOCKS[kind]))
        if kind == "text":
            _typed(block.get("text"), str, f"{param_of(place)}.text")
        found.append((place, block))
    return found


def _output(request: Json) -> Json:
    config = _fields(request.get("output_config", {}), "output_config", ("effort", "format"))
    chat = {"reasoning_effort": config["effort"]} if "effort" in config else {}
    if "format" in config:
        form = _fields(config["format"], "output_config.format", ("type", "schema"))
        if form.get("type") != "json_schema":
            raise invalid("expected json_schema", "output_config.format.type", "unsupported_field")
        schema = _typed(form.get("schema"), dict, "output_config.format.schema")
        chat["response_format"] = {"type": "json_schema", "json_schema": {"name": "json_schema", "schema": schema}}
    return chat


def _thinking(request: Json) -> Json:
    thinking = _fields(request.get("thinking", {}), "thinking", ("type", "budget_tokens", "display"))
    match thinking.get("type"):
        case "disabled":
            return {"reasoning_effort": "none"}
        case "enabled":
            return {"thinking_token_budget": _typed(thinking.get("budget_tokens"), int, "thinking.budget_tokens")}
        case "adaptive":
            return {}
    if "thinking" in request:
        raise invalid("expected enabled, disabled or adaptive", "thinking.type", "unsupported_field")
    return {}


def _tools(request: Json) -> Json:
    chat: Json = {}
    if "tools" in request:
        tools = enumerate(_typed(request["tools"], list, "tools"))
        chat = {"tools": [_tool(each, f"tools[{number}]") for number, each in tools], "tool_choice": "auto"}
    if "tool_choice" in request:
        choice = _fields(request["tool_choice"], "tool_choice", ("type", "name", "disable_parallel_tool_use"))
        kind = choice.get("type")
        if kind == "tool":
            name = _typed(choice.get("name"), str, "tool_choice.name")
            chat["tool_choice"] = {"type": "function", "function": {"name": name}}
        elif isinstance(kind, str) and kind in _CHOICES:
            chat["tool_choice"] = _CHOICES[kind]
        else:
            raise invalid("expected auto, any, tool or none", "tool_choice.type")
        chat["parallel_tool_calls"] = not choice.get("disable_parallel_tool_use")
    return chat


def _tool(tool: object, param: str) -> Json:
    if isinstance(tool, dict) and tool.get("type") not in (None, "custom"):
        text = "with images in the request, only tools of type custom are supported"
        raise invalid(text, f"{param}.type", "unsupported_field")
    names = ("type", "name", "description", "input_schema", "strict", "defer_loading", "cache_control")
    known = _fields(tool, param, names)
    schema = {"type": "object"} | _typed(known.get("input_schema"), dict, f"{param}.input_schema")
    function = {"name": _typed(known.get("name"), str, f"{param}.name"), "parameters": schema}
    function |= {name: known[name] for name in ("description", "strict", "defer_loading") if name in known}
    return {"type": "function", "function": function}


def _fields(value: object, param: str, known: tuple[str, ...]) -> Json:
    """The fields of an object that are not null. Raises ApiError for one that is not known."""
    found = {name: each for name, each in _typed(value, dict, param).items() if each is not None}
    for name in found:
        if name not in known:
            text = "with images in the request, this field is not supported"
            raise invalid(text, f"{param}.{name[:64]}".removeprefix("."), "unsupported_field")
    return found


def _typed(value: object, kind: type[T], param: str) -> T:
    if isinstance(value, kind) and not isinstance(value, bool):
        return value
    name = {dict: "an object", list: "a list", str: "a string", int: "an integer"}[kind]
    raise invalid(f"expected {name}, got {'nothing' if value is None else type(value).__name__}", param)
