"""Requests with other parts in the place of their images and clips. Pure functions."""

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import Any, Protocol
from uuid import uuid4

from vitwire.wire import Buffer
from vitwire_gateway.api_errors import invalid
from vitwire_gateway.bodies import Json
from vitwire_gateway.requests.image_refs import ImageRef

_REPLACED = frozenset(
    {"type", "detail", "uuid", "image_url", "image_embeds", "image_pil", "video_url", "video_embeds", "audio_embeds"}
)
"""Fields that the engine's part takes the place of; others are kept. In a part with a `uuid`, vLLM would read any."""


class Late(Protocol):
    """A string of a part, which is encoded in pieces when it is sent. It needs no escapes in JSON."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[bytes]: ...


def cut(request: Json, refs: Iterable[ImageRef]) -> list[bytes]:
    """The request as JSON, cut in the part of each image and clip where `filled` puts members of the engine's part.

    Raises ApiError for numbers that JSON cannot carry.
    """
    mark = uuid4().hex  # no caller can know it
    root = request.copy()
    copied = set[int]()
    for ref in refs:
        *path, last, _ = ref.path
        inner: Any = root
        for key in path:
            if id(inner[key]) not in copied:
                inner[key] = inner[key].copy()
                copied.add(id(inner[key]))
            inner = inner[key]
        inner[last] = {name: value for name, value in inner[last].items() if name not in _REPLACED} | {mark: 0}
    return serialised(root).split(f'"{mark}":0'.encode())


def serialised(request: Json) -> bytes:
    """The request as JSON. Raises ApiError for numbers that JSON cannot carry."""
    try:
        return json.dumps(request, separators=(",", ":"), allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise invalid(f"the body cannot be sent as JSON: {error}", None, "invalid_json") from error


class Filled:
    """A request with the members of each part in its place. Late strings are encoded each time they are read."""

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


def filled(pieces: Sequence[Buffer], parts: Iterable[Json], ids: Sequence[str] = ()) -> Filled:
    """The request with the members of each part in its place, and with ids for the engine's connector."""
    members = [_members(part) for part in parts]
    assert len(pieces) == len(members) + 1, "a place for each part"
    if ids:
        transfer = json.dumps({"ec_transfer_params": {"content_ids": ids}})
        pieces = [transfer[:-1].encode() + b"," + bytes(pieces[0])[1:], *pieces[1:]]
    return Filled([text for piece, inner in zip(pieces, [*members, []], strict=True) for text in (piece, *inner)])


def _members(part: Json) -> list[Buffer | Late]:
    """The members of a part as JSON, around its strings that are encoded late."""
    mark, late = uuid4().hex, list[Late]()

    def marked(value: Late) -> str:
        late.append(value)
        return mark

    between = json.dumps(part, separators=(",", ":"), default=marked)[1:-1].encode().split(mark.encode())
    return [text for pair in zip_longest(between, late, fillvalue=b"") for text in pair]
