"""Images that come with the request: data URIs, and files of a multipart form."""

import asyncio
import binascii
from collections.abc import AsyncGenerator, Mapping

from python_multipart.multipart import parse_options_header
from starlette.datastructures import FormData, Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from vitwire_gateway.openai.errors import ApiError, invalid

UPLOAD_SCHEME = "upload:"
"""`{"url": "upload:cat"}` names the file of the form's field `cat`."""
REQUEST_FIELD = "request"
"""The form's field that has the chat request, as JSON."""

_CHARSETS = (b"utf-8", b"utf8")


class _InMemoryParser(MultiPartParser):
    """Never writes parts to disk; the body is bounded and in memory already."""

    spool_max_size = 1 << 62


def parse_form(content_type: str, body: bytes, max_images: int) -> tuple[bytes, dict[str, bytes]]:
    """The chat request and the uploaded files of a multipart body, by field name. Raises ApiError.

    Its time is not bounded: call it in a worker, where starlette's parser gets an event loop of its own.
    """
    _, options = parse_options_header(content_type)
    charset = options.get(b"charset", b"utf-8").strip().lower()
    if charset not in _CHARSETS:  # Python has codecs that take the square of the length, or decode nothing
        raise invalid(
            f"Content-Type: charset {charset[:32].decode('latin-1')!r} is not supported, send utf-8",
            None,
            "invalid_form",
        )
    return asyncio.run(_parsed(Headers({"content-type": content_type}), body, max_images))


async def _parsed(headers: Headers, body: bytes, max_images: int) -> tuple[bytes, dict[str, bytes]]:
    parser = _InMemoryParser(
        headers, _chunks(body), max_files=max_images + 1, max_fields=1, max_part_size=max(1, len(body))
    )
    try:
        form = await parser.parse()
    except (MultiPartException, KeyError, UnicodeDecodeError) as error:
        text = error.message if isinstance(error, MultiPartException) else f"malformed form: {error}"
        raise invalid(text, None, "invalid_form") from error
    try:
        return await _request_and_files(form)
    finally:
        await form.close()


async def _request_and_files(form: FormData) -> tuple[bytes, dict[str, bytes]]:
    request: bytes | None = None
    files: dict[str, bytes] = {}
    for name, value in form.multi_items():
        content = await value.read() if isinstance(value, UploadFile) else value.encode()
        if name in files or (name == REQUEST_FIELD and request is not None):
            raise invalid("the form has this field twice", name, "invalid_form")
        if name == REQUEST_FIELD:
            request = content
        elif isinstance(value, UploadFile):
            files[name] = content
        else:
            raise invalid(f"unknown field; the chat request belongs in {REQUEST_FIELD!r}", name, "invalid_form")
    if request is None:
        raise invalid(f"the form has no field {REQUEST_FIELD!r} with the chat request", REQUEST_FIELD, "invalid_form")
    return request, files


async def _chunks(body: bytes) -> AsyncGenerator[bytes, None]:
    yield body


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
        raise invalid("expected data:image/...;base64,...", param, "invalid_image_url")
    if len(payload) // 4 * 3 > max_bytes + 2:
        raise too_large(max_bytes, param)
    try:
        return binascii.a2b_base64(payload.encode("ascii"), strict_mode=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        raise invalid(f"invalid base64: {error}", param, "invalid_base64") from error


def too_large(max_bytes: int, param: str) -> ApiError:
    """The error for an image of too many bytes."""
    return invalid(f"the image exceeds the limit of {max_bytes} bytes", param, "image_too_large")
