"""Chat requests from bodies of JSON and of forms, with the images and clips in them.

Small requests are read where they are; the rest, and all forms, in a worker.
"""

import asyncio
import binascii
import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

from python_multipart.multipart import parse_options_header
from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from vitwire.items import Modality
from vitwire.wire import Buffer
from vitwire_gateway.api_errors import ApiError, invalid
from vitwire_gateway.bodies import model_of, parse
from vitwire_gateway.fairness import Caller
from vitwire_gateway.images.fetching import too_large
from vitwire_gateway.openai.chat import Hole, ImageRef, RequestForm, check_clip_options, cut, images_of
from vitwire_gateway.workers import Workers

Kind = Literal["data", "upload", "url"]

UPLOAD_SCHEME = "upload:"
"""`{"url": "upload:cat"}` names the file of the form's field `cat`."""
REQUEST_FIELD = "request"
"""The form's field that has the chat request, as JSON."""
_CHARSETS = (b"utf-8", b"utf8")
_SMALL_BYTES = 64 << 10
_FEW_COMMAS = 2000
"""Bodies that are read at once have no more of both: none takes more than a few milliseconds."""
_MAX_URL = 8192
"""Characters in JSON, by which a worker answers."""
_LONGER_BYTES = 32 << 20
"""JSON in ASCII takes three times the bytes of UTF-8 at most, JSON in its strings a little more, and numbers are
written out: 1e15 has 18 characters."""


class Named(NamedTuple):
    """An image or clip as a request names it."""

    param: str
    """Its name in errors."""
    url: str
    modality: Modality = "image"
    is_base64: bool = False
    """The URL is the file itself, in base64."""


class Place(NamedTuple):
    """The name of an image or clip of a request in errors, and which of the sources it is."""

    param: str
    source: int


class Source(NamedTuple):
    """An image or clip of a request: its file, its URL, or what is wrong with it."""

    kind: Kind
    content: Buffer | str | ApiError
    modality: Modality = "image"


class ChatRequest(NamedTuple):
    """A chat request that has been read."""

    pieces: Sequence[Buffer]
    """Its JSON, cut for `chat.filled`; empty if the engine gets the body as it is."""
    places: Sequence[Place]
    """Of its images and clips, in order."""
    sources: Sequence[Source]
    """Each once."""
    model: str = ""
    """As the request names it, cut to 256 characters."""


class WithImages(Protocol):
    """A request of any form: its images."""

    @property
    def places(self) -> Sequence[Place]: ...

    @property
    def sources(self) -> Sequence[Source]: ...


class ChatLimits(NamedTuple):
    """Limits of a chat request, and where it is cut."""

    max_images: int
    max_image_bytes: int
    hole: Hole
    form: RequestForm = RequestForm(images_of)


async def read_chat(
    workers: Workers, caller: Caller, body: bytes, content_type: str, limits: ChatLimits
) -> ChatRequest:
    """The request in a body of JSON or of a form. Raises ApiError."""
    pieces, places, sources, model = await read(workers, caller, chat_of, body, content_type, limits)
    return ChatRequest(pieces, [Place(*each) for each in places], [Source(*each) for each in sources], model)


async def read(
    workers: Workers, caller: Caller, job: Callable[..., Any], body: bytes, content_type: str, *arguments: object
) -> Any:  # noqa: ANN401  # as the job returned it
    """`job(body, form, *arguments)`, as `Workers.run`, but here if the body is small and JSON. Raises ApiError.

    form: the type of a form; None if the body is JSON.
    """
    form = content_type if content_type.lower().startswith("multipart/form-data") else None
    if form is None and len(body) <= _SMALL_BYTES and body.count(b",") <= _FEW_COMMAS:
        return job(body, None, *arguments)
    return await workers.run(caller, job, body, 4 * len(body) + _LONGER_BYTES, form, *arguments)


def chat_of(body: bytes, form: str | None, limits: ChatLimits) -> ChatRequest:
    """The request in a body; `form` is the type of a form. Raises ApiError."""
    content, files = (body, {}) if form is None else parse_form(form, body, limits.max_images)
    request = parse(content)
    found = limits.form.images_of(request)
    if not found:
        return ChatRequest([] if form is None else [content], [], [], model_of(request))
    named = [Named(each.param, each.url, _modality_of(each), each.is_base64) for each in found]
    places, sources = sources_of(named, files, limits, str(found[0].path[0]))
    check_clip_options(request, found)
    if limits.form.as_chat is None:
        return ChatRequest(cut(request, found, limits.hole), places, sources, model_of(request))
    by_name = {place.param: place for place in places}
    chat = limits.form.as_chat(request)
    translated = images_of(chat)
    pieces = cut(chat, translated, limits.hole)
    return ChatRequest(pieces, [by_name[each.url] for each in translated], sources, model_of(request))


def _modality_of(ref: ImageRef) -> Modality:
    return "video" if ref.field == "video_url" else "image"


def sources_of(
    found: Sequence[Named], files: Mapping[str, bytes], limits: ChatLimits, field: str
) -> tuple[list[Place], list[Source]]:
    """The images and clips of a request, each source once. Raises ApiError for too many in `field`."""
    if len(found) > limits.max_images:
        what = "images and clips" if any(each.modality == "video" for each in found) else "images"
        text = f"the request has {len(found)} {what}, the limit is {limits.max_images}"
        raise invalid(text, field, "too_many_images")
    first: dict[Named, Named] = {}
    for each in found:
        first.setdefault(each._replace(param=""), each)
    numbers = {key: number for number, key in enumerate(first)}
    sources = [_source(each, files, limits.max_image_bytes) for each in first.values()]
    return [Place(each.param, numbers[each._replace(param="")]) for each in found], sources


def _source(named: Named, files: Mapping[str, bytes], max_bytes: int) -> Source:
    param, url, modality, is_base64 = named
    scheme = "data" if is_base64 else url[:8].partition(":")[0].lower()
    kind: Kind = "data" if scheme == "data" else "upload" if scheme == UPLOAD_SCHEME[:-1] else "url"
    try:
        if kind == "url":
            if len(json.dumps(url)) > _MAX_URL:
                raise invalid(f"the URL exceeds the limit of {_MAX_URL} characters", param, "invalid_image_url")
            return Source(kind, url, modality)
        if kind == "upload":
            file = upload(url, files, param)
        else:
            file = (decode_base64 if is_base64 else decode_data_uri)(url, max_bytes, param)
        if len(file) > max_bytes:
            raise too_large(max_bytes, param)
    except ApiError as error:
        return Source(kind, error, modality)
    return Source(kind, file, modality)


def upload(url: str, files: Mapping[str, bytes], param: str) -> bytes:
    """The uploaded file that an URL names. Raises ApiError if there is none."""
    name = url[len(UPLOAD_SCHEME) :]
    if name not in files:
        raise invalid(f"the request has no uploaded file {name[:64]!r}", param, "invalid_image_url")
    return files[name]


def decode_data_uri(url: str, max_bytes: int, param: str) -> bytes:
    """The bytes of a `data:` URI in base64. Raises ApiError."""
    head, comma, payload = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise invalid("expected data:...;base64,...", param, "invalid_image_url")
    return decode_base64(payload, max_bytes, param)


def decode_base64(payload: str, max_bytes: int, param: str) -> bytes:
    """The bytes of a text in base64. Raises ApiError."""
    if len(payload) // 4 * 3 > max_bytes + 2:
        raise too_large(max_bytes, param)
    try:
        return binascii.a2b_base64(payload.encode("ascii"), strict_mode=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        raise invalid(f"invalid base64: {error}", param, "invalid_base64") from error


class _InMemoryParser(MultiPartParser):
    """Never writes parts to disk; the body is bounded and in memory already."""

    spool_max_size = 1 << 62


def parse_form(content_type: str, body: bytes, max_images: int) -> tuple[bytes, dict[str, bytes]]:
    """The chat request and the uploaded files of a multipart body, by field name. Raises ApiError.

    Its time is not bounded: call it in a worker, where starlette's parser gets a new event loop.
    """
    _, options = parse_options_header(content_type)
    charset = options.get(b"charset", b"utf-8").strip().lower()
    if charset not in _CHARSETS:  # Python has codecs that take the square of the length, or decode nothing
        text = f"Content-Type: charset {charset[:32].decode('latin-1')!r} is not supported, send utf-8"
        raise invalid(text, None, "invalid_form")
    return asyncio.run(_parsed(Headers({"content-type": content_type}), body, max_images))


async def _parsed(headers: Headers, body: bytes, max_images: int) -> tuple[bytes, dict[str, bytes]]:
    async def chunks() -> AsyncGenerator[bytes, None]:
        yield body

    most = max(1, len(body))
    parser = _InMemoryParser(headers, chunks(), max_files=max_images + 1, max_fields=1, max_part_size=most)
    try:
        form = await parser.parse()
    except (MultiPartException, KeyError, UnicodeDecodeError) as error:
        text = error.message if isinstance(error, MultiPartException) else f"malformed form: {error}"
        raise invalid(text, None, "invalid_form") from error
    files: dict[str, bytes] = {}
    try:
        for name, value in form.multi_items():
            if name in files:
                raise invalid("the form has this field twice", name, "invalid_form")
            if isinstance(value, UploadFile):
                files[name] = await value.read()
            elif name == REQUEST_FIELD:
                files[name] = value.encode()
            else:
                raise invalid(f"unknown field; the chat request belongs in {REQUEST_FIELD!r}", name, "invalid_form")
    finally:
        await form.close()
    if REQUEST_FIELD not in files:
        raise invalid(f"the form has no field {REQUEST_FIELD!r} with the chat request", REQUEST_FIELD, "invalid_form")
    return files.pop(REQUEST_FIELD), files
