"""OpenAI chat requests: their images, and the request with other parts in the images' place. Pure functions."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Literal, Protocol
from uuid import uuid4

from vitwire.wire import Buffer
from vitwire_gateway.openai.errors import ApiError, invalid

Json = dict[str, Any]
Hole = Literal["part", "image"]
"""Whether the engine gets another part in the place of an image, or the part with another URL."""

_IMAGE_TYPES = ("image_url", "input_image")
_REPLACED = frozenset({"type", "image_url", "image_embeds", "detail", "uuid"})
"""Fields of an image part that the engine's part takes the place of; others are kept."""
_MAX_DIGITS = 400
"""Of an integer: reading one takes time in the square of its digits."""
_MAX_VALUES = 1_000_000
"""Of a request; each costs up to 100 bytes and 0.2 us, so that 64 MiB of them would cost gigabytes and seconds."""


class Late(Protocol):
    """A string of a part, which is encoded in pieces when it is sent. It needs no escapes in JSON."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[bytes]: ...


@dataclass(frozen=True, slots=True)
class ImageRef:
    """Where an image stands in a request, and its URL."""

    message: int
    part: int
    url: str

    @property
    def param(self) -> str:
        """Its name in errors."""
        return param_of(self.message, self.part)


def param_of(message: int, part: int) -> str:
    """The name of an image in errors."""
    return f"messages[{message}].content[{part}].image_url"


def parse(body: bytes | bytearray) -> Json:
    """The request. Raises ApiError if it is not a JSON object, or one of too many values."""
    if sum(body.count(each) for each in b",:[{") > _MAX_VALUES:
        raise invalid(f"the body has more than {_MAX_VALUES} values", None, "invalid_json")
    try:
        request = json.loads(body, parse_constant=_refuse_constant, parse_int=_integer)
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
        ImageRef(number, position, _url(part, param_of(number, position)))
        for number, content in _contents(request)
        for position, part in enumerate(content)
        if isinstance(part, dict) and ("image_url" in part or part.get("type") in _IMAGE_TYPES)
    ]


def cut(request: Json, refs: Iterable[ImageRef], hole: Hole) -> list[bytes]:
    """The request as JSON, cut in the part of each image where `filled` puts members of the engine's part.

    Raises ApiError for numbers that JSON cannot carry.
    """
    mark = uuid4().hex  # no caller can know it
    messages = list(request["messages"])
    copied: dict[int, list[Any]] = {}
    for ref in refs:
        if ref.message not in copied:
            copied[ref.message] = list(messages[ref.message]["content"])
            messages[ref.message] = messages[ref.message] | {"content": copied[ref.message]}
        copied[ref.message][ref.part] = _opened(copied[ref.message][ref.part], hole, mark)
    try:
        text = json.dumps(request | {"messages": messages}, separators=(",", ":"), allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise invalid(f"the body cannot be sent as JSON: {error}", None, "invalid_json") from error
    return text.encode().split(f'"{mark}":0'.encode())


class Filled:
    """A request with the members of each part in its place. What is encoded late is so each time it is read."""

    def __init__(self, pieces: Sequence[Buffer | Late]) -> None:
        self._pieces = pieces

    def __len__(self) -> int:
        return sum(map(len, self._pieces))

    def __iter__(self) -> Iterator[Buffer]:
        for piece in self._pieces:
            if isinstance(piece, Buffer):
                yield piece
            else:
                yield from piece

    @property
    def held(self) -> int:
        """Bytes that it takes beside its parts."""
        return sum(len(piece) for piece in self._pieces if isinstance(piece, Buffer))


def filled(pieces: Sequence[Buffer], parts: Iterable[Json]) -> Filled:
    """The request with the members of each part in its place."""
    members = [_members(part) for part in parts]
    assert len(pieces) == len(members) + 1, "a place for each part"
    return Filled([text for piece, own in zip(pieces, [*members, []], strict=True) for text in (piece, *own)])


def _members(part: Json) -> list[Buffer | Late]:
    """The members of a part as JSON, around its strings that are encoded late."""
    mark, late = uuid4().hex, list[Late]()

    def marked(value: Late) -> str:
        late.append(value)
        return mark

    between = json.dumps(part, separators=(",", ":"), default=marked)[1:-1].encode().split(mark.encode())
    return [text for pair in zip_longest(between, late, fillvalue=b"") for text in pair]


def _opened(part: Json, hole: Hole, mark: str) -> Json:
    """The part without what is replaced, and with the mark among its members, or among those of its image."""
    kept = {name: value for name, value in part.items() if name not in _REPLACED}
    if hole == "part":
        return kept | {mark: 0}
    image = part["image_url"]
    others = {name: value for name, value in image.items() if name != "url"} if isinstance(image, dict) else {}
    return kept | {"type": "image_url", "image_url": others | {mark: 0}}


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


def _integer(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"an integer of {len(digits)} digits, the limit is {_MAX_DIGITS}")
    return int(digits)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")
