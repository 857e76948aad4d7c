"""What callers pass as an image or a file. How a model's pixels are prepared does not matter here."""

import base64
import binascii
import io
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable
from urllib.parse import unquote_to_bytes

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from PIL.Image import Image


@runtime_checkable
class FileObject(Protocol):
    """A file that is open in binary mode, or anything else that is read like one."""

    def read(self, size: int, /) -> bytes: ...


FileLike: TypeAlias = "str | os.PathLike[str] | bytes | bytearray | memoryview | FileObject"
"""A path, a `data:` URI, the bytes of a file, or a file object."""
Loaded: TypeAlias = "str | os.PathLike[str] | bytes | Image | npt.NDArray[np.uint8]"
ImageLike: TypeAlias = "FileLike | Image | npt.NDArray[np.uint8]"

MAX_BYTES = 256 << 20
"""Of a file object or a `data:` URI."""
_URL = re.compile(r"(https?|ftps?|s3|gs|file):/", re.IGNORECASE)
_CHUNK = 1 << 20
_SHOWN = 80


def loaded(source: ImageLike) -> Loaded:
    """The source as a path, the bytes of a file, or a picture in memory.

    File objects are read to their end, from their start if they can seek. Raises ValueError for a URL, an invalid
    `data:` URI and more than `MAX_BYTES`, TypeError for a file in text mode, and OSError.
    """
    if isinstance(source, bytearray | memoryview):
        return bytes(source)
    if isinstance(source, str) and source[:5].lower() == "data:":
        return _of_data_uri(source)
    if isinstance(source, str | os.PathLike) and is_url(source):
        raise ValueError(
            f"{str(source)[:_SHOWN]} is a URL. The client fetches none, else whoever names an image would decide what "
            "this host connects to. Fetch it with httpx or requests and pass the bytes, or use `vitwire router`."
        )
    if isinstance(source, FileObject):
        return _of_file_object(source)
    return source


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether it names something on a network; paths lose one of the slashes."""
    return _URL.match(str(path)) is not None


def file_bytes(source: FileLike) -> bytes:
    """The bytes of a file. Raises as `loaded`, and TypeError for a picture in memory."""
    found = loaded(source)
    if isinstance(found, str | os.PathLike):
        return Path(found).read_bytes()
    if not isinstance(found, bytes):
        raise TypeError(f"expected a path, bytes, a data: URI or a file object, got {type(found).__name__}")
    return found


def _of_file_object(file: FileObject) -> bytes:
    if isinstance(file, io.TextIOBase):
        raise TypeError("the file is open in text mode: open it in binary mode ('rb')")
    if hasattr(file, "seekable") and file.seekable():
        file.seek(0)  # type: ignore[attr-defined]  # files that are seekable have it
    content = bytearray()
    while chunk := file.read(_CHUNK):
        if not isinstance(chunk, bytes | bytearray | memoryview):
            raise TypeError(f"read() of the file returned {type(chunk).__name__}: expected bytes, as of a file in 'rb'")
        content += chunk
        if len(content) > MAX_BYTES:
            raise ValueError(f"the file object has more than {MAX_BYTES} bytes: pass a path")
    if chunk is None:
        raise ValueError("the file object is in non-blocking mode and has no bytes yet")
    return bytes(content)


def _of_data_uri(uri: str) -> bytes:
    if len(uri) > 2 * MAX_BYTES:
        raise ValueError(f"the data: URI has more than {2 * MAX_BYTES} characters: pass the bytes")
    head, comma, payload = uri.partition(",")
    if not comma:
        raise ValueError(f"{uri[:_SHOWN]!r} is not a data: URI: it has no comma before its data")
    content = unquote_to_bytes(payload)
    if head.lower().endswith(";base64"):
        content = b"".join(content.split())
        try:
            content = base64.b64decode(content + b"=" * (-len(content) % 4), validate=True)
        except binascii.Error as error:
            raise ValueError(f"{head[:_SHOWN]}: invalid base64: {error}") from error
    if len(content) > MAX_BYTES:
        raise ValueError(f"the data: URI has more than {MAX_BYTES} bytes: pass the bytes")
    return content
