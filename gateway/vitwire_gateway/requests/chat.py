"""OpenAI requests for chat completions: their images and clips. Pure functions."""

from vitwire_gateway.bodies import Json
from vitwire_gateway.requests.image_refs import ImageRef, check_options, url_of

_IMAGE_TYPES = ("image_url", "input_image")


def images_of(request: Json, *, with_clips: bool = False) -> list[ImageRef]:
    """The images of all messages, and perhaps the clips, in order.

    Raises ApiError for a malformed part of these, and for options of images and clips.
    Every part with a field `image_url` (or `video_url`) counts, as engines read it whatever the part's type says.
    Messages and parts of other kinds are left to the engine to check.
    """
    found = []
    messages = request.get("messages")
    for number, message in enumerate(messages if isinstance(messages, list) else ()):
        content = message.get("content") if isinstance(message, dict) else None
        for position, part in enumerate(content if isinstance(content, list) else ()):
            field = _field(part) if isinstance(part, dict) else None
            if field == "image_url" or (field and with_clips):
                path = ("messages", number, "content", position, field)
                found.append(ImageRef(path, url_of(part.get(field), path)))
                check_options(request, part[field], found[-1])
    return found


def _field(part: Json) -> str | None:
    if "image_url" in part or part.get("type") in _IMAGE_TYPES:
        return "image_url"
    return "video_url" if "video_url" in part or part.get("type") == "video_url" else None
