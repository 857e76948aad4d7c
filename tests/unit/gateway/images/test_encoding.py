"""Image files on their way through the router's encoder: read in a worker, sent as they are, named by their content."""

import asyncio
import hashlib
import hmac
import io
import secrets
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest
from google.rpc.status_pb2 import Status
from PIL import Image
from typer.testing import CliRunner

from encoded_files import tiff
from entered import entered, entered_async
from fake_service import Fake, Running, abort, model_message, serving
from vitwire import AsyncClient, InvalidItem, Model, Unauthenticated
from vitwire.v1 import encoder_pb2 as pb
from vitwire_children.picture_formats import FORMATS
from vitwire_cli.app import app
from vitwire_gateway.api_errors import ApiError
from vitwire_gateway.gateway_settings import GatewaySettings, RouterSettings, SglangSettings
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


running = entered(lambda: serving(Remembering()), scope="function")


@asynccontextmanager
async def encoding(running: Running, pixels: int = PIXELS, token: str | None = None) -> AsyncIterator[Encoder]:
    workers = Workers("vitwire_gateway.images.image_files", memory_for(pixels, 1024))
    async with AsyncClient(running.target, token=token) as client:
        try:
            yield Encoder(client, workers, pixels, max_encoding=2)
        finally:
            await workers.close()


def file(kind: str, side: int = 40, **options: int) -> ImageFile:
    content = io.BytesIO()
    Image.new("RGB", (side, side)).save(content, kind, **options)
    return ImageFile.of(content.getvalue())


encoder = entered_async(encoding)


async def test_files_are_sent_as_they_are(running: Running, encoder: Encoder) -> None:
    files = [file(kind) for kind in FORMATS]
    encoded = await asyncio.gather(*map(encoder.encode, files))
    assert isinstance(running.fake, Remembering)
    assert {each.encoded for each in running.fake.items} == {each.content for each in files}
    assert not any(each.HasField("pixels") or each.HasField("grid") for each in running.fake.items)
    assert {each.embedding.grid for each in encoded} >= {(1, 10, 10)}, "as the service chose it"
    assert len({each.content_id for each in encoded}) == len(FORMATS)
    assert await encoder.media_type(files[-1]) == "image/jp2"


async def test_what_is_refused_is_not_sent(running: Running) -> None:
    async with encoding(running, pixels=1000) as encoder:
        with pytest.raises(InvalidItem, match="40x40 exceeds the limit of 1000 pixels"):
            await encoder.encode(file("PNG"))
        heic, slow = b"\0\0\0\x14ftypheic", tiff(32, 1_900_000, 1_900_000)
        for content, reason in ((b"", "not a JPEG, PNG"), (heic, "a HEIC image.*JPEG"), (slow, "more than 1 s of")):
            with pytest.raises(InvalidItem, match=reason):
                await encoder.encode(ImageFile.of(content))
    assert isinstance(running.fake, Remembering)
    assert running.fake.items == []


@pytest.mark.parametrize("kind", [RouterSettings, SglangSettings])
async def test_a_refused_token_is_reported(kind: type[GatewaySettings]) -> None:
    """Health needs no token, and the model does."""

    def before(context: grpc.ServicerContext) -> None:
        if ("authorization", "Bearer right") not in [tuple(each) for each in context.invocation_metadata()]:
            abort(context, grpc.StatusCode.UNAUTHENTICATED)

    reports = []
    fake = Remembering()
    fake.before = before
    with serving(fake) as running:
        for token in (None, "wrong", "right"):
            async with encoding(running, token=token) as encoder:
                reports.append(await encoder.probe(5.0, kind(token=token).refusal))
                if token != "right":
                    with pytest.raises(Unauthenticated):
                        await encoder.encode(file("PNG"))
    variable = "VITWIRE_ROUTER_TOKEN" if kind is RouterSettings else "VITWIRE_TOKEN"
    assert reports == [
        f"the encoder requires a token: set --token or {variable}",
        "the encoder refused the token of --token",
        "SERVING",
    ]
    command = "router" if kind is RouterSettings else "sglang-encoder"
    shown = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "400", "TERMINAL_WIDTH": "400"}).output
    assert f"env var: {variable}]" in shown


async def test_a_server_that_hangs_is_reported_in_time() -> None:
    """Its health answers, and its model does not."""
    free = threading.Event()

    def before(_: grpc.ServicerContext) -> None:
        free.wait(30)

    fake = Remembering()
    fake.before = before
    with serving(fake) as running:
        async with encoding(running) as encoder:
            async with asyncio.timeout(5):
                assert await encoder.probe(0.5, "") == "the encoder did not answer in time"
            free.set()
            assert await encoder.probe(5.0, "") == "SERVING"


async def test_the_largest_header_fits_in_a_worker(encoder: Encoder) -> None:
    """Pillow allocates two canvases when it opens a WebP."""
    header = await encoder.header(file("WEBP", 7000, method=0, quality=1))
    assert header == ("WEBP", 49_000_000)


async def test_a_server_that_prepares_nothing_is_named() -> None:
    with serving(Remembering(prepares=False)) as running:
        async with encoding(running) as encoder:
            with pytest.raises(ApiError, match="--decode-processes above 0") as caught:
                await encoder.encode(file("PNG"))
    assert (caught.value.status, caught.value.code) == (502, "encoder_without_decoders")


MP4 = ImageFile.of(b"\0\0\0\x18ftypmp42" + bytes(16), "video")


class Storing(Remembering):
    """Accepts each item, and stores it when `proceed` is set, with these seconds of frames in either answer."""

    def __init__(self, accepted: Sequence[float], stored: Sequence[float]) -> None:
        super().__init__()
        self.proceed = threading.Event()
        self.file_bytes: list[int] = []
        self.is_cached = False
        self._accepted, self._stored = accepted, stored

    def GetModel(self, request, context):  # noqa: N802, ANN001, ANN201
        message = super().GetModel(request, context)
        message.limits.cached_bytes = 1
        message.encodings.append(pb.ENCODING_MP4)
        return message

    def Encode(self, request, context):  # noqa: N802, ANN001, ANN201
        (sent,) = request.items
        self.file_bytes.append(len(sent.encoded))
        if not sent.encoded and not self.is_cached:
            error = Status(code=grpc.StatusCode.NOT_FOUND.value[0], message="not cached")
            yield pb.EncodeResponse(error=error)
            return
        grid = pb.Grid(t=2, h=4, w=4)
        accepted = pb.Accepted(grid=grid, tokens=8, frame_seconds=self._accepted, second_per_grid=1.02)
        yield pb.EncodeResponse(accepted=accepted)
        assert self.proceed.wait(30)
        stored = pb.EmbeddingStored(data_type=pb.DATA_TYPE_BFLOAT16, shape=(8, 12))
        times = {"frame_seconds": self._stored, "second_per_grid": 1.02}
        report = pb.ItemReport(path=pb.PATH_EAGER, tokens=8, grid=grid, **times)
        yield pb.EncodeResponse(stored=stored, report=report)


@pytest.mark.parametrize("accepted", [(0.0, 0.5, 1.0, 1.5), ()])
async def test_a_clip_is_referenced_once_its_times_are_known(accepted: Sequence[float]) -> None:
    """Servers of before say them when it is stored."""
    with serving(fake := Storing(accepted, (0.0, 0.5, 1.0, 1.5))) as running:
        async with encoding(running) as encoder, encoder.storing():
            task = asyncio.create_task(encoder.store(MP4))
            await asyncio.wait([task], timeout=1.0)
            assert task.done() == bool(accepted)
            fake.proceed.set()
            found = await task
            assert (found.grid, found.times.frame_seconds) == ((2, 4, 4), (0.0, 0.5, 1.0, 1.5))
            assert found.times.second_per_grid == 1.02


async def test_a_clip_without_times_is_refused() -> None:
    with serving(fake := Storing((), ())) as running:
        fake.proceed.set()
        async with encoding(running) as encoder, encoder.storing():
            with pytest.raises(InvalidItem, match="does not say how many frames"):
                await encoder.store(MP4)


@pytest.mark.parametrize("content", [b"", b"ftyp", b"\0\0\0\x18free", file("PNG").content, b"\x1a\x45\xdf"])
async def test_what_is_no_clip_is_not_sent(encoder: Encoder, content: bytes) -> None:
    with pytest.raises(InvalidItem, match="neither an MP4, WebM, AVI nor MPEG-TS file"):
        await encoder.media_type(ImageFile.of(content, "video"))
    assert await encoder.media_type(MP4) == "video/mp4"
    for start, kind in ((b"G" + bytes(187) + b"G", "mp2t"), (b"RIFF....AVI ", "x-msvideo")):
        assert await encoder.media_type(ImageFile.of(start, "video")) == f"video/{kind}"


def test_the_same_bytes_as_image_and_as_clip_are_two_contents() -> None:
    assert ImageFile.of(MP4.content).digest != MP4.digest


def test_content_ids_follow_from_what_decides_the_rows() -> None:
    """And from nothing else, so that replicas of one model share them."""
    file, key = ImageFile.of(b"file"), bytes(32)
    others = [
        replace(MODEL, weights_fingerprint="other"),
        replace(MODEL, dtype="float32"),
        replace(MODEL, preparation_fingerprint="other"),
        replace(MODEL, weights_fingerprint=MODEL.weights_fingerprint + MODEL.dtype, dtype=""),
    ]
    ids = {content_id_of(file, each, key) for each in (MODEL, *others)}
    ids |= {content_id_of(each, MODEL, key) for each in (ImageFile.of(b"other"), ImageFile.of(b"file", "video"))}
    ids |= {content_id_of(file._replace(modality="video"), MODEL, key), content_id_of(file, MODEL, b"another key")}
    assert len(ids) == 9
    assert content_id_of(file, replace(MODEL, device="another", budgets=()), key) == content_id_of(file, MODEL, key)


def test_nobody_without_the_key_can_compute_an_id() -> None:
    """As anyone could before, from what the server says of its model, and the file."""
    file = ImageFile.of(b"the victim's")
    recipe = hashlib.sha256(f"{MODEL.weights_fingerprint} {MODEL.dtype} {MODEL.preparation_fingerprint}".encode())
    public = hashlib.sha256(recipe.digest() + hashlib.sha256(b"the victim's").digest()).hexdigest()
    names = (MODEL.weights_fingerprint, MODEL.dtype, MODEL.preparation_fingerprint, "image", "")
    framed = b"".join(hashlib.sha256(each.encode()).digest() for each in names) + file.digest
    key = secrets.token_bytes(32)
    assert content_id_of(file, MODEL, key) == hmac.new(key, framed, "sha256").hexdigest()
    assert content_id_of(file, MODEL, key) not in (public, hashlib.sha256(framed).hexdigest())
