"""Files of images and clips as SGLang's requests name them: `data:` URIs, base64, URLs and paths."""

import binascii
import os
from pathlib import Path
from urllib.parse import unquote, urlparse

from anyio.to_thread import run_sync

from vitwire.items import Modality
from vitwire.shared.named_files import naming
from vitwire_gateway.api_errors import ApiError
from vitwire_gateway.gateway_settings import SglangSettings
from vitwire_gateway.images.fetching import Fetcher
from vitwire_gateway.images.image_files import ImageFile, opened_regular
from vitwire_gateway.sglang.receiver_requests import refused

_PIECE = 1 << 20
_MAX_PATH = 8192
_EXTENSIONS = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".mp4", ".webm")


class Media:
    """Reads files within the limits of settings: URLs by the fetcher, the rest in threads."""

    def __init__(self, settings: SglangSettings, fetcher: Fetcher) -> None:
        """Raises ValueError for a folder that does not exist."""
        self._fetcher = fetcher
        self._max_bytes = settings.max_image_bytes
        self._folders = tuple(map(_resolved, settings.allow_image_folder))

    async def image(self, source: str, modality: Modality = "image") -> ImageFile:
        """The file of one image or clip. Raises ApiError."""
        if source.startswith(("http://", "https://")):
            content = await self._fetcher.fetch(source, None)
        else:
            content = await run_sync(self.read, source)
        return await run_sync(ImageFile.of, content, modality)

    def read(self, source: str) -> bytes:
        """The bytes of a file in the request or in a file; the forms are distinguished as in SGLang."""
        if source.startswith("data:"):
            head, comma, payload = source.partition(",")
            if not comma or not head.lower().endswith(";base64"):
                raise refused("expected data:...;base64,...")
            return self._from_base64(payload)
        if source.startswith("file://"):
            try:
                return self._from_file(unquote(urlparse(source[:_MAX_PATH]).path))
            except ValueError as error:
                raise refused(f"not a file URL: {error}") from error
        if source.startswith("/") and source[-5:].lower().endswith(_EXTENSIONS):
            return self._from_file(source)
        return self._from_base64(source)

    def _from_base64(self, payload: str) -> bytes:
        """A piece at a time, as decoding keeps all threads waiting."""
        if len(payload) // 4 * 3 > self._max_bytes + 2:
            raise self._too_large()
        decoded = bytearray()
        try:
            view = memoryview(payload.encode("ascii"))
            for start in range(0, len(view), _PIECE):
                if len(decoded) != start // 4 * 3:
                    raise binascii.Error("padding in the middle")
                decoded += binascii.a2b_base64(view[start : start + _PIECE], strict_mode=True)
        except (binascii.Error, UnicodeEncodeError) as error:
            raise refused("expected a data: URI, base64 or a URL") from error
        return bytes(decoded)

    def _from_file(self, name: str) -> bytes:
        """The bytes of a regular file in one of the folders, links followed first."""
        if not self._folders:
            raise refused("this encoder reads no files; send the file as data:...;base64,...")
        try:
            path = Path(name).resolve(strict=True)
            if not any(path.is_relative_to(folder) for folder in self._folders):
                raise refused("the file is not in a folder that files may be read from")
            with open(path, "rb", opener=_opened) as file:  # Path.open has no opener
                encoded = file.read(self._max_bytes + 1)
        except (OSError, ValueError) as error:
            raise refused("the file cannot be read") from error
        if len(encoded) > self._max_bytes:
            raise self._too_large()
        return encoded

    def _too_large(self) -> ApiError:
        return refused(f"the file exceeds the limit of {self._max_bytes} bytes", 413)


def _opened(path: str, flags: int) -> int:
    return opened_regular(path, flags | os.O_NOFOLLOW)


def _resolved(folder: Path) -> Path:
    with naming("--allow-image-folder", folder):
        return folder.resolve(strict=True)
