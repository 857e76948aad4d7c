"""OpenAI requests for responses: their images. Pure functions."""

from vitwire_gateway.api_errors import invalid
from vitwire_gateway.bodies import Json
from vitwire_gateway.gateway_settings import Engine
from vitwire_gateway.requests.image_refs import ImageRef, Path, check_options, image_parts, param_of, url_of

_OUTPUTS = ("function_call_output", "custom_tool_call_output")


def images_of(request: Json, engine: Engine, *, with_clips: bool = False) -> list[ImageRef]:
    """The images of all input items, in order.

    Raises ApiError for a malformed image, for its options, for one where the engine would drop it, and unless clips are
    left to the engine, for a clip: SGLang would fetch its URL. Other parts and items are left to the engine to check.
    """
    found = []
    items = request.get("input")
    for number, item in enumerate(items if isinstance(items, list) else ()):
        if with_clips:
            _check_no_clips(item, number)
        for path, part in image_parts(item, ("input", number)):
            field = (*path, "image_url")
            if not _is_taken(item, path[2:], engine):
                text = f"{engine} takes no image here; put it in the content of a message of role user"
                raise invalid(text, param_of(field), "unsupported_image")
            if part.get("file_id") is not None:
                text = "files by id are not supported; send image_url with data:image/...;base64,..."
                raise invalid(text, param_of(field), "unsupported_image")
            found.append(ImageRef(field, url_of(part.get("image_url"), field)))
            check_options(request, part["image_url"], found[-1])
    return found


def _check_no_clips(item: object, number: int) -> None:
    content = item.get("content") if isinstance(item, dict) else None
    for position, part in enumerate(content if isinstance(content, list) else ()):
        if isinstance(part, dict) and (part.get("type") == "video_url" or "video_url" in part):
            param = param_of(("input", number, "content", position, "video_url"))
            raise invalid("clips are supported in /v1/chat/completions only", param, "unsupported_clip")


def _is_taken(item: object, path: Path, engine: Engine) -> bool:
    """True if the engine reads images at this path in an item; elsewhere it takes the text and drops the rest."""
    if not isinstance(item, dict) or len(path) != 2 or not isinstance(path[1], int):
        return False
    kind = item.get("type")
    if path[0] == "output":
        return engine == "vllm" and kind in _OUTPUTS
    return path[0] == "content" and kind in (None, "message") and item.get("role") == "user"
