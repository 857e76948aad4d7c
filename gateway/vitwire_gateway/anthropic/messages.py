"""Anthropic requests for messages: their images. Pure functions."""

from vitwire_gateway.api_errors import invalid
from vitwire_gateway.bodies import Json
from vitwire_gateway.requests.image_refs import ImageRef, Path, image_parts, param_of

FIELD = "source"
"""The field of an image block that holds the image."""
MESSAGES = "/v1/messages"


def is_anthropic(path: str) -> bool:
    """True for Anthropic's API: its errors and keys have its form."""
    return path == MESSAGES or path.startswith(f"{MESSAGES}/")


def images_of(request: Json) -> list[ImageRef]:
    """The images of all messages, also in tool results, in order.

    Raises ApiError for a malformed image, and for one where engines would drop it. Other blocks are left to the engine
    to check.
    """
    found = []
    messages = request.get("messages")
    items: list[tuple[Path, object]] = [(("system",), request.get("system"))]
    items += [
        (("messages", number), each) for number, each in enumerate(messages if isinstance(messages, list) else ())
    ]
    for start, item in items:
        for path, part in image_parts(item, start):
            if not _is_taken(item, path[2:]):
                text = "images belong in the content of a message of role user or assistant, or of a user's tool_result"
                raise invalid(text, param_of((*path, FIELD)), "unsupported_image")
            found.append(_reference((*path, FIELD), part.get(FIELD)))
    return found


def _is_taken(message: object, path: Path) -> bool:
    """True if engines read images at this path in a message."""
    match message, path:
        case {"role": "user" | "assistant"}, ("content", int()):
            return True
        case {"role": "user", "content": blocks}, ("content", int(position), "content", int()):
            return bool(blocks[position].get("type") == "tool_result")
    return False


def _reference(path: Path, source: object) -> ImageRef:
    param = param_of(path)
    kind = source.get("type") if isinstance(source, dict) else None
    if kind == "file":
        raise invalid("files by id are not supported; send a source of type base64", param, "unsupported_image")
    field = {"base64": "data", "url": "url"}.get(kind) if isinstance(kind, str) else None
    if not isinstance(source, dict) or field is None:
        raise invalid('expected {"type": "base64", "media_type": "image/...", "data": ...}', param, "invalid_image_url")
    content = source.get(field)
    if not isinstance(content, str) or not content:
        raise invalid(f"expected a string in the field {field}", f"{param}.{field}", "invalid_image_url")
    return ImageRef(path, content, is_base64=kind == "base64")
