"""Files of images as SGLang's requests name them: `data:` URIs, base64, URLs and paths."""

import asyncio
import binascii
import os
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from urllib.parse import unquote, urlparse

from vitwire_gateway.openai.encoding import ImageFile
from vitwire_gateway.openai.files import opened_regular
from vitwire_gateway.sglang.parts import Refused

Fetch = Callable[[str], Awaitable[bytes]]

_PIECE = 1 << 20
_MAX_PATH = 8192
_EXTENSIONS = (".png", ".jpg", ".jpeg", ".webp", ".gif")


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """What images may be, and where they may come from."""

    max_images: int = 64
    """Images per part."""
    max_image_bytes: int = 20 << 20
    max_image_pixels: int = 50_000_000
    folders: tuple[Path, ...] = ()
    """Folders that paths may be in."""


class Media:
    """Reads images in threads. `fetch` gets the bytes behind a URL; without it, URLs are refused."""

    def __init__(self, limits: MediaLimits, fetch: Fetch | None = None) -> None:
        self._limits = limits
        self._fetch = fetch
        self._folders = tuple(folder.resolve(strict=True) for folder in limits.folders)
        self._threads = ThreadPoolExecutor(min(8, os.cpu_count() or 1), "vitwire-images")

    @property
    def max_images(self) -> int:
        """Images per part."""
        return self._limits.max_images

    async def image(self, source: str) -> ImageFile:
        """The file of one image. Raises Refused."""
        run = asyncio.get_running_loop().run_in_executor
        if source.startswith(("http://", "https://")):
            content = await self._fetched(source)
        else:
            content = await run(self._threads, self._read, source)
        return await run(self._threads, ImageFile.of, content)

    def close(self) -> None:
        """Drop the threads; work that has begun runs to its end."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _fetched(self, url: str) -> bytes:
        if self._fetch is None:
            raise Refused("this encoder fetches no URLs; send the image as data:image/...;base64,...")
        return await self._fetch(url)

    def _read(self, source: str) -> bytes:
        """The bytes of an image in the request or in a file; the forms are distinguished as in SGLang."""
        if source.startswith("data:"):
            head, comma, payload = source.partition(",")
            if not comma or not head.lower().endswith(";base64"):
                raise Refused("expected data:image/...;base64,...")
            return self._from_base64(payload)
        if source.startswith("file://"):
            return self._from_file(_path(source[:_MAX_PATH]))
        if source.startswith("/") and source[-5:].lower().endswith(_EXTENSIONS):
            return self._from_file(source)
        return self._from_base64(source)

    def _from_base64(self, payload: str) -> bytes:
        if len(payload) // 4 * 3 > self._limits.max_image_bytes + 2:
            raise self._too_large()
        try:
            return _decoded(payload.encode("ascii"))
        except (binascii.Error, UnicodeEncodeError) as error:
            raise Refused("expected a data: URI, base64 or a URL of an image") from error

    def _from_file(self, name: str) -> bytes:
        """The bytes of a regular file in one of the folders, links followed first."""
        if not self._folders:
            raise Refused("this encoder reads no files; send the image as data:image/...;base64,...")
        try:
            path = Path(name).resolve(strict=True)
            if not any(path.is_relative_to(folder) for folder in self._folders):
                raise Refused("the file is not in a folder that images may be read from")
            with open(path, "rb", opener=_opened) as file:  # Path.open has no opener
                encoded = file.read(self._limits.max_image_bytes + 1)
        except (OSError, ValueError) as error:
            raise Refused("the file cannot be read") from error
        if len(encoded) > self._limits.max_image_bytes:
            raise self._too_large()
        return encoded

    def _too_large(self) -> Refused:
        limit = self._limits.max_image_bytes
        return Refused(f"the image exceeds the limit of {limit} bytes", HTTPStatus.REQUEST_ENTITY_TOO_LARGE)


def _decoded(payload: bytes) -> bytes:
    """Base64, a piece at a time, as decoding keeps all threads waiting. Raises binascii.Error."""
    view, decoded = memoryview(payload), bytearray()
    for start in range(0, len(view), _PIECE):
        if len(decoded) != start // 4 * 3:
            raise binascii.Error("padding in the middle")
        decoded += binascii.a2b_base64(view[start : start + _PIECE], strict_mode=True)
    return bytes(decoded)


def _path(url: str) -> str:
    try:
        return unquote(urlparse(url).path)
    except ValueError as error:
        raise Refused(f"not a file URL: {error}") from error


def _opened(path: str, flags: int) -> int:
    return opened_regular(path, flags | os.O_NOFOLLOW)
