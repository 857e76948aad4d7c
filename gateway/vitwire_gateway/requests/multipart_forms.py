"""Forms with a request in JSON, and files that its URLs name."""

from collections.abc import AsyncGenerator

from python_multipart.multipart import parse_options_header
from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from vitwire_gateway.api_errors import invalid

REQUEST_FIELD = "request"
"""The form's field that has the request, as JSON."""
_CHARSETS = (b"utf-8", b"utf8")


class _InMemoryParser(MultiPartParser):
    """Never writes parts to disk; the body is bounded and in memory already."""

    spool_max_size = 1 << 62


def opened(body: bytes, form: str | None, max_images: int) -> tuple[bytes, dict[str, bytes]]:
    """The JSON of a request, and the uploaded files by field name; `form` is the type of a form. Raises ApiError.

    The time of a form is not bounded: call it in a worker, where no event loop can be made for starlette's parser.
    """
    if form is None:
        return body, {}
    _, options = parse_options_header(form)
    charset = options.get(b"charset", b"utf-8").strip().lower()
    if charset not in _CHARSETS:  # Python has codecs that take the square of the length, or decode nothing
        text = f"Content-Type: charset {charset[:32].decode('latin-1')!r} is not supported, send utf-8"
        raise invalid(text, None, "invalid_form")
    parsing = _parsed(Headers({"content-type": form}), body, max_images)
    try:
        parsing.send(None)
    except StopIteration as done:
        result: tuple[bytes, dict[str, bytes]] = done.value
        return result
    raise AssertionError("all of the body is there: nothing waits")


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
                raise invalid(f"unknown field; the request belongs in {REQUEST_FIELD!r}", name, "invalid_form")
    finally:
        await form.close()
    if REQUEST_FIELD not in files:
        raise invalid(f"the form has no field {REQUEST_FIELD!r} with the request", REQUEST_FIELD, "invalid_form")
    return files.pop(REQUEST_FIELD), files
