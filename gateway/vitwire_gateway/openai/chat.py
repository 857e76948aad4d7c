"""OpenAI chat requests: their images and clips, and the request with other parts in their place. Pure functions."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import Any, Literal, NamedTuple, Protocol
from uuid import uuid4

from vitwire.wire import Buffer
from vitwire_gateway.api_errors import invalid
from vitwire_gateway.bodies import Json

Hole = Literal["part", "image", "input_image", "source"]
"""The engine gets another part in the place of an image or clip, or the part with another URL or source."""
Path = tuple[str | int, ...]
"""Keys and indices that lead to a part in a request."""

_IMAGE_TYPES = ("image_url", "input_image")
_REPLACED = frozenset(
    {"type", "detail", "uuid", "image_url", "image_embeds", "image_pil", "video_url", "video_embeds", "audio_embeds"}
)
"""Fields that the engine's part takes the place of; others are kept. In a part with a `uuid`, vLLM would read any."""
_CLIP_OPTIONS = ("mm_processor_kwargs", "media_io_kwargs", "video_config", "use_audio_in_video")
"""Fields of a request by which engines choose the frames of its clips, or use their sound."""
_INNER = ("content", "output", "source")
"""Fields of parts that may have parts in them."""
_DEEPEST = 16
"""Keys on the way to a part; no engine reads deeper ones."""


class Late(Protocol):
    """A string of a part, which is encoded in pieces when it is sent. It needs no escapes in JSON."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[bytes]: ...


class ImageRef(NamedTuple):
    """The path to the part of an image or clip in a request, its URL and the field that has it."""

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
    """The name of an image or clip in errors, such as `messages[1].content[2].image_url`."""
    return "".join(f"[{each}]" if isinstance(each, int) else f".{each}" for each in (*path, field))[1:]


def images_of(request: Json, *, with_clips: bool = False) -> list[ImageRef]:
    """The images of all messages, and perhaps the clips, in order. Raises ApiError for a malformed part of these.

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
                path = ("messages", number, "content", position)
                found.append(ImageRef(path, url_of(part.get(field), param_of(path, field), field), field))
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


def _field(part: Json) -> str | None:
    """The field with the image or clip of a part."""
    if "image_url" in part or part.get("type") in _IMAGE_TYPES:
        return "image_url"
    return "video_url" if "video_url" in part or part.get("type") == "video_url" else None


def url_of(source: object, param: str, field: str = "image_url") -> str:
    """The URL of an image or clip, given as a string or as an object with `url`. Raises ApiError."""
    url = source.get("url") if isinstance(source, dict) else source
    if isinstance(url, str) and url:
        return url
    code = "invalid_image_url" if field == "image_url" else "invalid_clip_url"
    if isinstance(source, dict):
        raise invalid("expected a string in the field url", f"{param}.url", code)
    kind = "nothing" if source is None else type(source).__name__
    raise invalid(f'expected {{"url": "data:{field.removesuffix("_url")}/..."}}, got {kind}', param, code)


def check_clip_options(request: Json, refs: Iterable[ImageRef]) -> None:
    """Raises ApiError if the clips among `refs` have options, which would have no effect on their embeddings."""
    clips = [each for each in refs if each.field == "video_url"]
    given = [name for name in _CLIP_OPTIONS if clips and request.get(name)]
    for clip in clips:
        part: Any = request
        for key in clip.path:
            part = part[key]
        if isinstance(part["video_url"], dict):
            given += [
                f"{clip.param}.{name[:32]}" for name, value in part["video_url"].items() if name != "url" and value
            ]
    if given:
        text = "it has no effect on clips that the encoder prepares, by the rule of its model; leave it out"
        raise invalid(text, given[0], "unsupported_option")


def cut(request: Json, refs: Iterable[ImageRef], hole: Hole) -> list[bytes]:
    """The request as JSON, cut in the part of each image and clip where `filled` puts members of the engine's part.

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
        inner[ref.path[-1]] = _opened(inner[ref.path[-1]], ref.field, hole, mark)
    try:
        text = json.dumps(root, separators=(",", ":"), allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise invalid(f"the body cannot be sent as JSON: {error}", None, "invalid_json") from error
    return text.encode().split(f'"{mark}":0'.encode())


def _opened(part: Json, field: str, hole: Hole, mark: str) -> Json:
    """The part without what is replaced, and with the mark among its members or those of the field."""
    kept = {name: value for name, value in part.items() if name not in _REPLACED}
    if hole == "part":
        return kept | {mark: 0}
    if hole == "input_image":
        return kept | {"type": hole, "detail": part.get("detail", "auto"), mark: 0}
    if hole == "source":
        return kept | {"type": "image", hole: {mark: 0}}
    source = part[field]
    others = {name: value for name, value in source.items() if name != "url"} if isinstance(source, dict) else {}
    return kept | {"type": field, field: others | {mark: 0}}


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
