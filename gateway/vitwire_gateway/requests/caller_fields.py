"""Requests without what only the router may say: embeddings, and ids of contents. Pure functions."""

from collections.abc import Iterator

from vitwire_gateway.api_errors import invalid
from vitwire_gateway.bodies import Json, parse
from vitwire_gateway.requests.filling import serialised
from vitwire_gateway.requests.image_sources import Limits

_MARKS = (b"embeds", b"image_pil", b"uuid", b"ec_transfer_params", b"\\u", b"\0")
"""What is changed or refused has one of these names, unless escaped or in UTF-16; other bodies are not changed."""
_BEFORE = b" \t\r\n\0\xef\xbb\xbf\xfe\xff"
"""May come before an object in JSON, in any encoding; what begins otherwise is no request for an engine to read."""
_MEDIA = ("image", "audio", "video", "vision", "embeds")
"""One of these is in a field or the type of each part that engines read as media."""
_OF_CALLERS = {
    "arguments", "chat_template_kwargs", "metadata", "parameters", "response_format", "schema", "structured_outputs",
    "tools",
}  # fmt: skip
"""Fields whose objects, such as schemas, are the caller's: engines read no parts there."""


def cleaned(body: bytes, limits: Limits) -> tuple[Json, bool]:
    """The request in a body, and whether the engine must get it in place of the body. Raises ApiError.

    Removes ids of parts and parameters of transfers. Refuses embeddings; if they are allowed, only grids without
    rows, for which an engine would look up what others have sent.
    """
    request = parse(body)
    if not any(mark in body for mark in _MARKS):
        return request, False
    for part in _objects(request):
        part.pop("ec_transfer_params", None)
        names = (*part, kind := str(part.get("type")))
        for name in names:
            rows = part.get(name)
            if not name.endswith(("_embeds", "image_pil")) or (rows is None and name != kind):
                continue
            if not limits.allow_embeds or (isinstance(rows, dict) and not rows.get(name)):
                text = "embeddings of callers are refused unless the router has --allow-caller-embeds; send the file"
                raise invalid("expected rows" if limits.allow_embeds else text, name[:64], "embeds_refused")
        if "uuid" in part and any(word in name for name in names for word in _MEDIA):
            del part["uuid"]
    return request, True


def clean_body(body: bytes, limits: Limits) -> list[bytes]:
    """The request, `cleaned`, that the engine gets in place of a body; empty if it gets the body."""
    if body.lstrip(_BEFORE)[:1] not in (b"{", b"[") or not any(mark in body for mark in _MARKS):
        return []
    return [serialised(cleaned(body, limits)[0])]


def _objects(request: Json) -> Iterator[Json]:
    """All objects of a request that engines may read as parts or parameters."""
    waiting: list[object] = [request]
    while waiting:
        value = waiting.pop()
        if isinstance(value, list):
            waiting += value
        elif isinstance(value, dict):
            yield value
            waiting += (value[name] for name in value if name not in _OF_CALLERS)
