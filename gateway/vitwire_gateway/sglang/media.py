"""Files of images and clips as SGLang's requests have them: `data:` URIs, base64 and URLs."""

import binascii

from anyio.to_thread import run_sync

from vitwire.items import Modality
from vitwire_gateway.images.fetching import Fetcher
from vitwire_gateway.images.image_files import ImageFile
from vitwire_gateway.sglang.receiver_requests import refused

_PIECE = 1 << 20


class Media:
    """Reads files of `max_bytes` at most: URLs by the fetcher, the rest in threads."""

    def __init__(self, max_bytes: int, fetcher: Fetcher) -> None:
        self._fetcher = fetcher
        self._max_bytes = max_bytes

    async def image(self, source: str, modality: Modality = "image") -> ImageFile:
        """The file of one image or clip. Raises ApiError."""
        if source.startswith(("http://", "https://")):
            content = await self._fetcher.fetch(source, None)
        else:
            content = await run_sync(self.read, source)
        return await run_sync(ImageFile.of, content, modality)

    def read(self, source: str) -> bytes:
        """The bytes of a file in the request; the forms are distinguished as in SGLang.

        They are decoded a piece at a time, as decoding keeps all threads waiting.
        """
        payload = source
        if source.startswith("data:"):
            head, comma, payload = source.partition(",")
            if not comma or not head.lower().endswith(";base64"):
                raise refused("expected data:...;base64,...")
        elif source.startswith("file://"):
            raise refused("this encoder reads no files; send the file as data:...;base64,...")
        if len(payload) // 4 * 3 > self._max_bytes + 2:
            raise refused(f"the file exceeds the limit of {self._max_bytes} bytes", 413)
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
