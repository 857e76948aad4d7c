"""OpenAI chat requests: their images, and the request with other parts in the images' place. Pure functions."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import Any, Literal, NamedTuple, Protocol
from uuid import uuid4

from vitwire.wire import Buffer
from vitwire_gateway.api_errors import invalid
from vitwire_gateway.bodies import Json

Hole = Literal["part", "image", "input_image", "source"]
"""The engine gets another part in the place of an image, or the part with another URL, `input_image` or `source`."""
Path = tuple[str | int, ...]
"""Keys and indices that lead to a part in a request."""

_IMAGE_TYPES = ("image_url", "input_image")
_REPLACED = frozenset({"type", "image_url", "image_embeds", "detail", "uuid"})
"""Fields of an image part that the engine's part takes the place of; others are kept."""
_INNER = ("content", "output", "source")
"""Fields of parts that may have parts in them."""
_DEEPEST = 16
"""Keys on the way to a part; no engine reads deeper ones."""


class Late(Protocol):
    """A string of a part, which is encoded in pieces when it is sent. It needs no escapes in JSON."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[bytes]: ...


class ImageRef(NamedTuple):
    """The path to an image part in a request, and its URL."""

    path: Path
    url: str
    field: str = "image_url"
    is_base64: bool = False
    """The URL is the file itself, in base64."""

    @property
    def param(self) -> str:
        """Its name in errors."""
        return param_of(self.path, self.field)


class RequestForm(NamedTuple):
    """An API's requests."""

    images_of: Callable[[Json], list[ImageRef]]
    """Raises ApiError for a malformed image, and for one in a place where the engine takes none."""
    as_chat: Callable[[Json], Json] | None = None
    """Translates a request with images; the URL of each is then its name in errors. Raises ApiError."""


def param_of(path: Path, field: str = "image_url") -> str:
    """The name of an image in errors, such as `messages[1].content[2].image_url`."""
    return "".join(f"[{each}]" if isinstance(each, int) else f".{each}" for each in (*path, field))[1:]


def images_of(request: Json) -> list[ImageRef]:
    """The images of all messages, in order. Raises ApiError for a malformed image part.

    Every part with a field `image_url` counts, as engines read it whatever the part's type says. Messages and parts of
    other kinds are left to the engine to check.
    """
    found = []
    messages = request.get("messages")
    for number, message in enumerate(messages if isinstance(messages, list) else ()):
        content = message.get("content") if isinstance(message, dict) else None
        for position, part in enumerate(content if isinstance(content, list) else ()):
            if isinstance(part, dict) and ("image_url" in part or part.get("type") in _IMAGE_TYPES):
                path = ("messages", number, "content", position)
                found.append(ImageRef(path, url_of(part.get("image_url"), param_of(path))))
    return found


def image_parts(value: object, path: Path) -> Iterator[tuple[Path, Json]]:
    """All parts in a value that are images by their type or fields, in order, with their paths."""
    waiting = [(path, value)]
    while waiting:
        path, value = waiting.pop()
        inner: list[tuple[str | int, object]] = []
        if isinstance(value, list):
            inner = list(enumerate(value))
        elif isinstance(value, dict):
            if value.get("type") in (*_IMAGE_TYPES, "image") or "image_url" in value:
                yield path, value
                continue
            inner = [(name, value[name]) for name in _INNER if name in value]
        if len(path) < _DEEPEST:
            waiting += (((*path, key), each) for key, each in reversed(inner) if isinstance(each, dict | list))


def url_of(image: object, param: str) -> str:
    """The URL of an image, given as a string or as an object with `url`. Raises ApiError."""
    url = image.get("url") if isinstance(image, dict) else image
    if isinstance(url, str) and url:
        return url
    if isinstance(image, dict):
        raise invalid("expected a string in the field url", f"{param}.url", "invalid_image_url")
    kind = "nothing" if image is None else type(image).__name__
    raise invalid(f'expected {{"url": "data:image/..."}}, got {kind}', param, "invalid_image_url")


def cut(request: Json, refs: Iterable[ImageRef], hole: Hole) -> list[bytes]:
    """The request as JSON, cut in the part of each image where `filled` puts members of the engine's part.

    Raises ApiError for numbers that JSON cannot carry.
    """
    mark = uuid4().hex  # no caller can know it
    root = request.copy()
    copied = set[int]()
    for ref in refs:
        inner: Any = root
        for key in ref.path[:-1]:
            if id(inner[key]) not in copied:
                inner[key] = inner[key].copy()
                copied.add(id(inner[key]))
            inner = inner[key]
        inner[ref.path[-1]] = _opened(inner[ref.path[-1]], hole, mark)
    try:
        text = json.dumps(root, separators=(",", ":"), allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise invalid(f"the body cannot be sent as JSON: {error}", None, "invalid_json") from error
    return text.encode().split(f'"{mark}":0'.encode())


def _opened(part: Json, hole: Hole, mark: str) -> Json:
    """The part without what is replaced, and with the mark among its members or its image's members."""
    kept = {name: value for name, value in part.items() if name not in _REPLACED}
    if hole == "part":
        return kept | {mark: 0}
    if hole == "input_image":
        return kept | {"type": hole, "detail": part.get("detail", "auto"), mark: 0}
    if hole == "source":
        return kept | {"type": "image", hole: {mark: 0}}
    image = part["image_url"]
    others = {name: value for name, value in image.items() if name != "url"} if isinstance(image, dict) else {}
    return kept | {"type": "image_url", "image_url": others | {mark: 0}}


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
        """Bytes that it takes in addition to its parts."""
        return sum(len(piece) for piece in self._pieces if isinstance(piece, Buffer))


def filled(pieces: Sequence[Buffer], parts: Iterable[Json]) -> Filled:
    """The request with the members of each part in its place."""
    members = [_members(part) for part in parts]
    assert len(pieces) == len(members) + 1, "a place for each part"
    return Filled([text for piece, inner in zip(pieces, [*members, []], strict=True) for text in (piece, *inner)])


def _members(part: Json) -> list[Buffer | Late]:
    """The members of a part as JSON, around its strings that are encoded late."""
    mark, late = uuid4().hex, list[Late]()

    def marked(value: Late) -> str:
        late.append(value)
        return mark

    between = json.dumps(part, separators=(",", ":"), default=marked)[1:-1].encode().split(mark.encode())
    return [text for pair in zip_longest(between, late, fillvalue=b"") for text in pair]
