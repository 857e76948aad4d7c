"""OpenAI chat requests: their images, and the request with other parts in the images' place. Pure functions."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vitwire.router.errors import ApiError, invalid

Json = dict[str, Any]

_IMAGE_TYPES = ("image_url", "input_image")
_REPLACED = frozenset({"type", "image_url", "detail", "uuid"})
"""Fields of an image part that the engine's part takes the place of; others are kept."""
_MAX_VALUES = 1_000_000
"""Of a request; each costs up to 100 bytes and 0.2 us, so that 64 MiB of them would cost gigabytes and seconds."""


@dataclass(frozen=True, slots=True)
class ImageRef:
    """Where an image stands in a request, and its URL."""

    message: int
    part: int
    url: str

    @property
    def param(self) -> str:
        """Its name in errors."""
        return f"messages[{self.message}].content[{self.part}].image_url"


def parse(body: bytes | bytearray) -> Json:
    """The request. Raises ApiError if it is not a JSON object, or one of too many values."""
    if sum(body.count(each) for each in b",:[{") > _MAX_VALUES:
        raise invalid(f"the body has more than {_MAX_VALUES} values", None, "invalid_json")
    try:
        request = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise invalid(f"the body is not valid JSON: {error}", None, "invalid_json") from error
    if not isinstance(request, dict):
        raise invalid("the body is not a JSON object", None, "invalid_json")
    return request


def images_of(request: Json) -> list[ImageRef]:
    """The images of all messages, in order. Raises ApiError for a malformed image part.

    Every part with a field `image_url` counts, as engines read it whatever the part's type says. Messages and parts of
    other kinds are left to the engine to check.
    """
    return [
        ImageRef(number, position, _url(part, f"messages[{number}].content[{position}].image_url"))
        for number, content in _contents(request)
        for position, part in enumerate(content)
        if isinstance(part, dict) and ("image_url" in part or part.get("type") in _IMAGE_TYPES)
    ]


def rewritten(request: Json, parts: Mapping[ImageRef, Json]) -> bytes:
    """The request as JSON, with each image's part replaced. Raises ApiError for numbers that JSON cannot carry."""
    contents = dict(_contents(request))
    messages = list(request["messages"])
    for number in {ref.message for ref in parts}:
        messages[number] = messages[number] | {"content": list(contents[number])}
    for ref, part in parts.items():
        content = messages[ref.message]["content"]
        content[ref.part] = _merged(content[ref.part], part)
    try:
        return json.dumps(request | {"messages": messages}, separators=(",", ":"), allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise invalid(f"the body cannot be sent as JSON: {error}", None, "invalid_json") from error


def _merged(original: Json, part: Json) -> Json:
    """The engine's part with the fields of the original that it does not replace."""
    image = original.get("image_url")
    if "image_url" in part and isinstance(image, dict):
        part = part | {"image_url": image | part["image_url"]}
    return {name: value for name, value in original.items() if name not in _REPLACED} | part


def _contents(request: Json) -> Iterator[tuple[int, Sequence[Any]]]:
    """The content of each message that has a list of parts."""
    messages = request.get("messages")
    for number, message in enumerate(messages if isinstance(messages, list) else ()):
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list):
            yield number, content


def _url(part: Json, param: str) -> str:
    """The URL of an image part, given as a string or as an object with `url`."""
    image = part.get("image_url")
    url = image.get("url") if isinstance(image, dict) else image
    if isinstance(url, str) and url:
        return url
    raise _no_url(image, param)


def _no_url(image: object, param: str) -> ApiError:
    if isinstance(image, dict):
        return invalid("expected a string in the field url", f"{param}.url", "invalid_image_url")
    kind = "nothing" if image is None else type(image).__name__
    return invalid(f'expected {{"url": "data:image/..."}}, got {kind}', param, "invalid_image_url")


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")
