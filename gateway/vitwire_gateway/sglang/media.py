"""Files of images and clips as SGLang's requests have them: `data:` URIs, base64 and URLs."""

from anyio.to_thread import run_sync

from vitwire.items import Modality
from vitwire.shared.data_uris import decoded, mistaken, payload_of
from vitwire_gateway.images.fetching import Fetcher
from vitwire_gateway.images.image_files import ImageFile
from vitwire_gateway.sglang.receiver_requests import refused


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
        """The bytes of a file in the request; the forms are distinguished as in SGLang."""
        if source.startswith("file://"):
            raise refused(str(mistaken(source)))
        try:
            payload = payload_of(source) if source[:5].lower() == "data:" else source
            if len(payload) // 4 * 3 > self._max_bytes + 2:
                text = f"the file exceeds the limit of {self._max_bytes} bytes (--max-image-bytes)"
                raise refused(text, 413)
            return decoded(payload)
        except ValueError as error:
            raise refused(f"expected a data: URI, base64 or a URL: {error}") from error
