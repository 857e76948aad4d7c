"""What a worker reads for the router: chat requests with the files in them, and the headers of image files.

Small requests are read where they are; the rest, all files included, in a worker.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from PIL import Image, UnidentifiedImageError

from vitwire import InvalidItem, Item
from vitwire.wire import Buffer
from vitwire_gateway.openai.errors import ApiError, invalid
from vitwire_gateway.openai.rewriting import Hole, cut, images_of, param_of, parse
from vitwire_gateway.openai.shares import Caller
from vitwire_gateway.openai.uploads import UPLOAD_SCHEME, decode_data_uri, parse_form, too_large, upload
from vitwire_gateway.openai.workers import Answer, Workers

Kind = Literal["data", "upload", "url"]

_SMALL_BYTES = 64 << 10
"""Bodies that are read at once: no such body takes more than a few milliseconds."""
_MAX_URL = 8192
_LONGER_BYTES = 32 << 20
"""JSON in ASCII takes three times the bytes of UTF-8 at most, and numbers are written out: 1e15 has 18 characters."""
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
"""The only ones that are tried on what callers send."""


class Place(NamedTuple):
    """Where an image stands in a request, and which of the sources it is."""

    message: int
    part: int
    source: int

    @property
    def param(self) -> str:
        """Its name in errors."""
        return param_of(self.message, self.part)


class Source(NamedTuple):
    """An image of a request: its file, its URL, or what is wrong with it."""

    kind: Kind
    content: Buffer | str | ApiError


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A chat request that has been read."""

    pieces: Sequence[Buffer]
    """Its JSON, cut for `rewriting.filled`; empty if the engine gets the body as it is."""
    places: Sequence[Place]
    """Of its images, in order."""
    sources: Sequence[Source]
    """Each once."""


class ChatLimits(NamedTuple):
    """What a chat request may have, and how it is cut."""

    max_images: int
    max_image_bytes: int
    hole: Hole


class Header(NamedTuple):
    """What the first bytes of an image file say."""

    kind: str
    """Pillow's name of the format."""
    pixels: int


async def read_chat(
    workers: Workers, caller: Caller, body: bytes, content_type: str, limits: ChatLimits
) -> ChatRequest:
    """The request in a body of JSON or of a form. Raises ApiError."""
    is_form = content_type.lower().startswith("multipart/form-data")
    if not is_form and len(body) <= _SMALL_BYTES:
        return chat_of(body, None, limits)
    arguments = {"form": content_type if is_form else None, "limits": limits}
    return _chat(await workers.run(caller, "chat", arguments, [body], 3 * len(body) + _LONGER_BYTES))


def chat_of(body: bytes, form: str | None, limits: ChatLimits) -> ChatRequest:
    """The request in a body; `form` is the type of a form. Raises ApiError."""
    files: dict[str, bytes] = {}
    content = body
    if form is not None:
        content, files = parse_form(form, body, limits.max_images)
    request = parse(content)
    found = images_of(request)
    if len(found) > limits.max_images:
        text = f"the request has {len(found)} images, the limit is {limits.max_images}"
        raise invalid(text, "messages", "too_many_images")
    numbers: dict[str, int] = {}
    places = [Place(each.message, each.part, numbers.setdefault(each.url, len(numbers))) for each in found]
    first = {place.source: place.param for place in reversed(places)}
    sources = [_source(url, files, limits.max_image_bytes, first[number]) for url, number in numbers.items()]
    pieces = cut(request, found, limits.hole) if found else [] if form is None else [content]
    return ChatRequest(pieces, places, sources)


def _source(url: str, files: dict[str, bytes], max_bytes: int, param: str) -> Source:
    scheme = url[:8].partition(":")[0].lower()
    kind: Kind = "data" if scheme == "data" else "upload" if scheme == UPLOAD_SCHEME[:-1] else "url"
    try:
        if kind == "url":
            if len(url) > _MAX_URL:
                raise invalid(f"the URL exceeds the limit of {_MAX_URL} characters", param, "invalid_image_url")
            return Source(kind, url)
        file = decode_data_uri(url, max_bytes, param) if kind == "data" else upload(url, files, param)
        if len(file) > max_bytes:
            raise too_large(max_bytes, param)
    except ApiError as error:
        return Source(kind, error)
    return Source(kind, file)


def _read_chat(*, form: str | None, limits: ChatLimits, blobs: list[bytes]) -> tuple[dict[str, Any], list[Buffer]]:
    request = chat_of(blobs[0], form, limits)
    sources: list[dict[str, Any]] = []
    returned = list(request.pieces)
    for kind, content in request.sources:
        if isinstance(content, ApiError):
            sources.append({"kind": kind, "error": [content.message, content.code, content.param]})
        elif isinstance(content, str):
            sources.append({"kind": kind, "url": content})
        else:
            sources.append({"kind": kind})
            returned.append(content)
    return {"places": request.places, "sources": sources}, returned


def _chat(answer: Answer) -> ChatRequest:
    places = [Place(*each) for each in answer.head["places"]]
    files = sum("error" not in each and "url" not in each for each in answer.head["sources"])
    pieces = answer.blobs[: len(answer.blobs) - files]
    blobs = iter(answer.blobs[len(pieces) :])

    def content(source: dict[str, Any]) -> Buffer | str | ApiError:
        if "error" in source:
            message, code, param = source["error"]
            return ApiError(400, message, code, param)
        return source["url"] if "url" in source else next(blobs)

    return ChatRequest(pieces, places, [Source(each["kind"], content(each)) for each in answer.head["sources"]])


async def header_of(workers: Workers, caller: Caller, image: bytes, max_pixels: int) -> Header:
    """The header of an image file. Raises InvalidItem, or ApiError if no worker is left."""
    try:
        answer = await workers.run(caller, "header", {"max_pixels": max_pixels}, [image], 0)
    except ApiError as error:
        if error.status == 400:
            raise InvalidItem(error.message, item=0) from error
        raise
    return Header(answer.head["kind"], answer.head["pixels"])


async def item_of(workers: Workers, caller: Caller, image: bytes, max_pixels: int) -> Item:
    """The only place where an image file becomes an item: as it is, once its header is known. Raises as `header_of`."""
    await header_of(workers, caller, image, max_pixels)
    return Item(encoded=image)


def _read_header(*, max_pixels: int, blobs: list[bytes]) -> tuple[dict[str, Any], list[Buffer]]:
    (content,) = blobs
    try:
        return open_image(content, max_pixels)._asdict(), []
    except (InvalidItem, MemoryError) as error:
        raise ApiError(400, _brief(error), "invalid_image") from error
    except Exception as error:  # libraries raise anything over broken files
        raise ApiError(400, f"cannot be read: {_brief(error)}", "invalid_image") from error


def open_image(image: bytes, max_pixels: int) -> Header:
    """The header of an image file. Raises InvalidItem for other files and for too many pixels."""
    try:
        with Image.open(io.BytesIO(image), formats=_FORMATS) as opened:
            (width, height), kind = opened.size, opened.format or ""
    except UnidentifiedImageError as error:
        raise InvalidItem("not a JPEG, PNG, WebP, GIF or BMP image", item=0) from error
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError, Warning) as error:
        raise InvalidItem(f"cannot be read as an image: {error}", item=0) from error
    if width * height > max_pixels:
        raise InvalidItem(f"{width}x{height} exceeds the limit of {max_pixels} pixels", item=0)
    return Header(kind, width * height)


def _brief(error: BaseException) -> str:
    if isinstance(error, MemoryError):
        return "needs more memory than it may take"
    return " ".join(str(error).split()) or type(error).__name__


JOBS = {"chat": _read_chat, "header": _read_header}
