"""What callers may pass as an image, an item and a target, and what they are told about anything else."""

import base64
import gzip
import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from both_clients import Call, both
from fake_service import Running, item
from vitwire import AsyncClient, Client, InvalidItem, Item
from vitwire._arguments import image_items
from vitwire._inputs import sources
from vitwire._inputs.sources import file_bytes, loaded
from vitwire._transport.channel import checked_target

URLS = ["https://example.com/cat.png", "HTTP://example.com", Path("https://example.com/cat.png"), "s3://bucket/cat.png"]


@pytest.fixture(scope="module")
def png() -> bytes:
    pixels = np.random.default_rng(0).integers(0, 255, (32, 40, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


class Trickle(io.RawIOBase):
    """A file that cannot seek, and returns less than it is asked for, as sockets do."""

    def __init__(self, content: bytes) -> None:
        self._rest = content

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        part, self._rest = self._rest[:7], self._rest[7:]
        buffer[: len(part)] = part
        return len(part)


def at_its_end(content: bytes) -> io.BytesIO:
    """As a file that was just written."""
    file = io.BytesIO()
    file.write(content)
    return file


FORMS = {
    "bytes": lambda png: png,
    "bytearray": bytearray,
    "memoryview": memoryview,
    "buffer": at_its_end,
    "trickle": Trickle,
    "gzip": lambda png: gzip.GzipFile(fileobj=io.BytesIO(gzip.compress(png))),
    "base64": lambda png: f"data:image/png;base64,{base64.b64encode(png).decode()}",
    "parameters": lambda png: f'DATA:video/mp4;codecs=vp8,opus;x=",;base64,";BASE64,{base64.b64encode(png).decode()}',
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_a_file(form: str, png: bytes) -> None:
    assert loaded(FORMS[form](png)) == png
    assert Item.from_file(FORMS[form](png)).encoded == png


def test_paths_and_pictures_stay_as_they_are(tmp_path: Path) -> None:
    picture = np.zeros((4, 4, 3), np.uint8)
    for source in (tmp_path, str(tmp_path), picture, Image.new("RGB", (4, 4))):
        assert loaded(source) is source
    with pytest.raises(TypeError, match="ndarray"):
        file_bytes(picture)


@pytest.mark.parametrize("url", URLS)
def test_urls_are_not_fetched(url: Any) -> None:
    for read in (loaded, Item.from_file):
        with pytest.raises(ValueError, match=r"is a URL\. The client fetches none.*httpx or requests"):
            read(url)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("data:image/png;base64", "expected data:...;base64,"),
        ("data:image/png;base64,AAAA\nAAAA", "line breaks"),
        ("/9j/" + "A" * 5000, "is base64 without its head: write data:image/jpeg;base64, .* or pass the bytes"),
        ("file:///cat.png", "is a file: URL: pass the path"),
        ("data:image/png;base64,AAAAA", "invalid base64"),
        (io.StringIO("text"), "text mode.*'rb'"),
        (type("Reader", (), {"read": lambda *_: "text"})(), "returned str"),
        (type("Reader", (), {"read": lambda *_: None})(), "non-blocking"),
    ],
)
def test_what_cannot_be_read(source: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        file_bytes(source)


def test_what_is_read_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MAX_BYTES", 100)
    assert loaded(io.BytesIO(bytes(100))) == bytes(100)
    endless = type("Endless", (), {"read": lambda _, size: bytes(size)})()
    for source in (endless, io.BytesIO(bytes(101)), f"data:;base64,{'x' * 136}", f"data:;base64,{'x' * 1000}"):
        with pytest.raises(ValueError, match=r"more than \d+ (bytes|characters)") as raised:
            loaded(source)
        assert "xx" not in str(raised.value)


def test_errors_do_not_repeat_the_whole_source() -> None:
    with pytest.raises(ValueError, match="invalid base64") as raised:
        loaded(f"data:{'x' * 1000};base64,?")
    assert len(str(raised.value)) < 200


@both
async def test_images_in_every_form(make: Call, running: Running, png: bytes, tmp_path: Path) -> None:
    (tmp_path / "photo.png").write_bytes(png)
    with (tmp_path / "photo.png").open("rb") as file:
        sources: list[Any] = [file, file, tmp_path / "photo.png", *(form(png) for form in FORMS.values())]
        async with make(running.target, timeout=20) as client:
            embeddings = await client.encode_images(sources)
            with pytest.raises(InvalidItem, match="frame 0 is a file: open it with Pillow"):
                await client.encode_clips([[io.BytesIO(png), png]])
    assert [each.shape for each in embeddings] == [(20, 12)] * len(sources)
    assert len({each.numpy().tobytes() for each in embeddings}) == 1


@both
async def test_images_that_cannot_be_used_are_named_by_position(client: Any, png: bytes) -> None:
    reasons = [
        (io.StringIO("text"), "text mode"),
        ("data:image/png;base64,????", "base64"),
        ("nowhere.png", "be read: "),
    ]
    for wrong, reason in (*((url, "is a URL") for url in URLS), *reasons):
        with pytest.raises(InvalidItem, match=reason) as raised:
            await client.encode_images([png, wrong])
        assert raised.value.item == 1
    with pytest.raises(TypeError, match="a list of images, got a single BytesIO"):
        await client.encode_images(io.BytesIO(png))


def test_a_file_is_sent_as_it_is(running: Running, png: bytes) -> None:
    with Client(running.target, timeout=20) as client:
        (sent,) = image_items([Trickle(png)], client.model(), {})
    assert (sent.encoded, sent.pixels) == (png, None)


@both
async def test_items_are_not_images(client: Any) -> None:
    expected = "expected an Item, got str: use encode_images"
    for items in ([item(), "photo.jpg"], iter([item(), "photo.jpg"])):
        with pytest.raises(InvalidItem, match=expected) as raised:
            [each async for each in client.iter_encode(items)]
        assert raised.value.item == 1
    for encode in (client.encode, client.encode_cached):
        with pytest.raises(InvalidItem, match=expected) as raised:
            await encode([item(), "photo.jpg"])
        assert raised.value.item == 1
        for single in (item(), "photo.jpg"):
            with pytest.raises(TypeError, match="a list of Items, got a single"):
                await encode(single)


@both
async def test_the_target_is_by_default_that_of_the_environment(
    make: Call, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VITWIRE_TARGET", running.target)
    async with make(timeout=20) as client:
        assert (await client.model()).model_id == "tiny"


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_a_missing_target_is_a_clear_error(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for value in (None, ""):
        monkeypatch.delenv("VITWIRE_TARGET", raising=False)
        if value is not None:
            monkeypatch.setenv("VITWIRE_TARGET", value)
        with pytest.raises(ValueError, match="no target: pass one, such as 'localhost:50051', or set VITWIRE_TARGET"):
            kind()
    monkeypatch.setenv("VITWIRE_TARGET", "http://host:5")
    with pytest.raises(ValueError, match="is a URL"):
        kind()


@pytest.mark.parametrize(
    ("target", "meant"),
    [
        ("localhost", "localhost:50051"),
        ("localhost:1", "localhost:1"),
        ("::1", "[::1]:50051"),
        ("[::1]", "[::1]:50051"),
        ("[::1]:7", "[::1]:7"),
        ("dns:///encoder.pool", "dns:///encoder.pool:50051"),
        ("dns://8.8.8.8/encoder:5", "dns://8.8.8.8/encoder:5"),
        ("ipv4:10.0.0.1:5,10.0.0.2", "ipv4:10.0.0.1:5,10.0.0.2:50051"),
        ("ipv6:[::1]", "ipv6:[::1]:50051"),
        ("ipv6:[::1]:5,::2", "ipv6:[::1]:5,[::2]:50051"),
        ("ipv6:::1:8080", "ipv6:[::1:8080]:50051"),
        ("ipv6:[fe80::1%25eth0]:5", "ipv6:[fe80::1%25eth0]:5"),
        ("vsock:2:1234", "vsock:2:1234"),
        ("unix:/run/vitwire", "unix:/run/vitwire"),
        ("xds:///encoder", "xds:///encoder"),
    ],
)
def test_a_target_without_a_port_means_the_usual_one(target: str, meant: str) -> None:
    """gRPC would try port 443."""
    assert checked_target(target) == meant


@pytest.mark.parametrize(
    "target",
    [
        *(":5", "localhost:", "[::1]:x", "dns:///", "dns:///:5", "ipv4:x", "ipv4:", "h:99999"),
        *(
            "ipv6:::1]",
            "ipv6:[::1:5",
            "ipv6:[]:5",
            "[::1",
            "[::1]]:5",
            "[::1]x:5",
            "[name]:5",
            "host:1:2",
            "dns:///[::1",
        ),
    ],
)
def test_a_malformed_target_is_refused(target: str) -> None:
    with pytest.raises(ValueError, match=f"target '{re.escape(target)}'"):
        checked_target(target)
