"""Image files on their way through the router's encoder: read in a worker, sent as they are, named by their content."""

import asyncio
import io
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from PIL import Image

from fake_service import Fake, Running, model_message, serving
from vitwire import AsyncClient, InvalidItem, Model
from vitwire_gateway.api_errors import ApiError
from vitwire_gateway.images.encoding import Encoder, content_id_of
from vitwire_gateway.images.image_files import ImageFile
from vitwire_gateway.workers import Workers, memory_for

MODEL = Model.from_message(model_message())
PIXELS = 50_000_000


class Remembering(Fake):
    """Keeps the items that it gets, and prepares nothing if asked to."""

    def __init__(self, *, prepares: bool = True) -> None:
        super().__init__()
        self.items: list[Any] = []
        self._prepares = prepares

    def Encode(self, request, context):  # noqa: N802, ANN001, ANN201
        self.items += request.items
        return super().Encode(request, context)

    def GetModel(self, request, context):  # noqa: N802, ANN001, ANN201
        message = super().GetModel(request, context)
        if not self._prepares:
            del message.prepared[:], message.encodings[:]
        return message


@pytest.fixture
def running() -> Iterator[Running]:
    with serving(Remembering()) as running:
        yield running


@asynccontextmanager
async def encoding(running: Running, pixels: int = PIXELS) -> AsyncIterator[Encoder]:
    workers = Workers("vitwire_gateway.images.image_files", memory_for(pixels, 1024))
    async with AsyncClient(running.target) as client:
        try:
            yield Encoder(client, workers, pixels, max_encoding=2)
        finally:
            await workers.close()


def file(kind: str, side: int = 40, **options: int) -> ImageFile:
    content = io.BytesIO()
    Image.new("RGB", (side, side)).save(content, kind, **options)
    return ImageFile.of(content.getvalue())


async def test_files_are_sent_as_they_are(running: Running) -> None:
    files = [file(kind) for kind in ("JPEG", "PNG", "WEBP", "GIF", "BMP")]
    async with encoding(running) as encoder:
        encoded = await asyncio.gather(*map(encoder.encode, files))
    assert isinstance(running.fake, Remembering)
    assert {each.encoded for each in running.fake.items} == {each.content for each in files}
    assert not any(each.HasField("pixels") or each.HasField("grid") for each in running.fake.items)
    assert {each.embedding.grid for each in encoded} == {(1, 10, 10)}, "as the service chose it"
    assert len({each.content_id for each in encoded}) == 5


async def test_what_is_refused_is_not_sent(running: Running) -> None:
    async with encoding(running, pixels=1000) as encoder:
        with pytest.raises(InvalidItem, match="40x40 exceeds the limit of 1000 pixels"):
            await encoder.encode(file("PNG"))
        for content in (b"no image", file("TIFF").content):
            with pytest.raises(InvalidItem, match="not a JPEG, PNG, WebP, GIF or BMP image"):
                await encoder.encode(ImageFile.of(content))
    assert isinstance(running.fake, Remembering)
    assert running.fake.items == []


async def test_the_largest_header_fits_in_a_worker(running: Running) -> None:
    """Pillow allocates two canvases when it opens a WebP."""
    async with encoding(running) as encoder:
        header = await encoder.header(file("WEBP", 7000, method=0, quality=1))
    assert header == ("WEBP", 49_000_000)


async def test_a_server_that_prepares_nothing_is_named() -> None:
    with serving(Remembering(prepares=False)) as running:
        async with encoding(running) as encoder:
            with pytest.raises(ApiError, match="--decode-processes above 0") as caught:
                await encoder.encode(file("PNG"))
    assert (caught.value.status, caught.value.code) == (502, "encoder_without_decoders")


def test_content_ids_follow_from_what_decides_the_rows() -> None:
    """And from nothing else, so that replicas of one model share them."""
    digest = bytes(32)
    others = [
        replace(MODEL, weights_fingerprint="other"),
        replace(MODEL, dtype="float32"),
        replace(MODEL, preparation_fingerprint="other"),
    ]
    ids = {content_id_of(digest, each) for each in (MODEL, *others)} | {content_id_of(bytes(31), MODEL)}
    assert len(ids) == 5
    assert content_id_of(digest, replace(MODEL, device="another", budgets=())) == content_id_of(digest, MODEL)
