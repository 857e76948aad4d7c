"""OpenAI requests for chat completions: their images and clips. Pure functions."""

from vitwire_gateway.api_errors import invalid
from vitwire_gateway.bodies import Json
from vitwire_gateway.requests.image_refs import IMAGE_TYPES, ImageRef, param_of, url_of

_CLIP_OPTIONS = ("mm_processor_kwargs", "media_io_kwargs", "video_config", "use_audio_in_video")
"""Fields of a request by which engines choose the frames of its clips, or use their sound."""


def images_of(request: Json, *, with_clips: bool = False) -> list[ImageRef]:
    """The images of all messages, and perhaps the clips, in order.

    Raises ApiError for a malformed part of these, and for options of clips.
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
                if field == "video_url":
                    _check_options(request, part[field], param_of(path))
    return found


def _field(part: Json) -> str | None:
    """The field with the image or clip of a part."""
    if "image_url" in part or part.get("type") in IMAGE_TYPES:
        return "image_url"
    return "video_url" if "video_url" in part or part.get("type") == "video_url" else None


def _check_options(request: Json, source: object, param: str) -> None:
    """Raises ApiError if a clip has options, which would have no effect on its embedding."""
    given = [name for name in _CLIP_OPTIONS if request.get(name)]
    if isinstance(source, dict):
        given += [f"{param}.{name[:32]}" for name, value in source.items() if name != "url" and value]
    if given:
        text = "it has no effect on clips that the encoder prepares, by the rule of its model; leave it out"
        raise invalid(text, given[0], "unsupported_option")
