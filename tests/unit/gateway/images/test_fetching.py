"""Images fetched from URLs, from a real HTTP server on loopback."""

import asyncio
import socket
import ssl
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
import trustme

from vitwire_gateway.api_errors import ApiError, overloaded
from vitwire_gateway.gateway_settings import RouterSettings, SglangSettings
from vitwire_gateway.images.fetching import Fetcher

LIMIT = 100_000
IMAGE = bytes(range(256)) * 16


class Site:
    """A web server that answers by path."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.requests: list[str] = []

    def url(self, path: str, host: str = "127.0.0.1", scheme: str = "http") -> str:
        return f"{scheme}://{host}:{self.port}{path}"

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.requests.append(head)
            await self._send(head.split()[1], writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _send(self, path: str, writer: asyncio.StreamWriter) -> None:
        if path.startswith("/to/"):
            location = path.removeprefix("/to/")
            writer.write(f"HTTP/1.1 302 Found\r\nLOCATION: {location}\r\nContent-Length: 0\r\n\r\n".encode())
        elif path == "/endless":
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
            while not writer.is_closing():
                writer.write(b"x" * 65536)
                await writer.drain()
        elif path == "/slow":
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
            while not writer.is_closing():
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(0.05)
        elif path == "/short":
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nx")
        elif path == "/garbage":
            writer.write(b"hello\r\n\r\n")
        elif path == "/missing":
            writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
        elif path != "/nothing":
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(IMAGE) + IMAGE)
        await writer.drain()


async def started(tls: ssl.SSLContext | None = None) -> tuple[Site, asyncio.Server]:
    site = Site(0)
    server = await asyncio.start_server(site.answer, "127.0.0.1", 0, ssl=tls)
    site.port = server.sockets[0].getsockname()[1]
    return site, server


@pytest.fixture
async def site() -> AsyncGenerator[Site, None]:
    site, server = await started()
    yield site
    server.close()


def fetcher(site: Site, *hosts: str, networks: tuple[str, ...] = ("127.0.0.0/8",), seconds: float = 20) -> Fetcher:
    hosts = hosts or (f"127.0.0.1:{site.port}", f"localhost:{site.port}")
    return Fetcher(
        RouterSettings(
            allow_image_host=hosts, allow_image_network=networks, max_image_bytes=LIMIT, fetch_seconds=seconds
        )
    )


async def refused(fetching: Fetcher, url: str) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await fetching.fetch(url, "p")
    await fetching.close()
    assert (caught.value.status, caught.value.param) == (400, "p")
    return caught.value


async def test_allowed(site: Site) -> None:
    fetching = fetcher(site)
    assert await fetching.fetch(site.url("/cat.jpg?size=2"), "p") == IMAGE
    assert await fetching.fetch(site.url("/dog.jpg", "LOCALHOST"), "p") == IMAGE
    await fetching.close()
    assert site.requests[0].startswith("GET /cat.jpg?size=2 HTTP/1.1\r\n")
    assert f"host: localhost:{site.port}\r\n" in site.requests[1].lower()


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("http://other.example/x", "image_url_refused"),
        ("http://127.0.0.1:1/x", "image_url_refused"),
        ("http://127.0.0.1@other.example/x", "image_url_refused"),
        ("http://user:pass@127.0.0.1:{port}/x", "image_url_refused"),
        ("http://0x7f000001:{port}/x", "image_url_refused"),
        ("http://2130706433:{port}/x", "image_url_refused"),
        ("http://[::ffff:127.0.0.1]:{port}/x", "image_url_refused"),
        ("ftp://127.0.0.1/x", "invalid_image_url"),
        ("file:///etc/passwd", "invalid_image_url"),
        ("gopher://127.0.0.1:{port}/x", "invalid_image_url"),
        ("/etc/passwd", "invalid_image_url"),
        ("127.0.0.1:{port}/x", "invalid_image_url"),
        ("http://", "invalid_image_url"),
        ("http://[::1", "invalid_image_url"),
        ("http://127.0.0.1:{port}/\r\nX: y", "invalid_image_url"),
        ("http://127.0.0.1:99999/", "image_url_refused"),
        ("http://" + "a" * 70000, "invalid_image_url"),
        ("http://\ud800/", "invalid_image_url"),
    ],
)
async def test_urls_that_are_not_allowed(site: Site, url: str, code: str) -> None:
    assert (await refused(fetcher(site), url.replace("{port}", str(site.port)))).code == code
    assert site.requests == []


async def test_private_addresses(site: Site) -> None:
    for host in ("127.0.0.1", "localhost"):
        error = await refused(fetcher(site, networks=()), site.url("/", host))
        assert (error.code, "no public address" in str(error)) == ("image_url_refused", True)
    assert site.requests == []


async def test_refusals_name_the_flag(site: Site) -> None:
    nowhere = Fetcher(RouterSettings())
    elsewhere, private = fetcher(site, "other.example"), fetcher(site, networks=())
    host, network = (
        f"--allow-image-{each} or VITWIRE_ROUTER_ALLOW_IMAGE_{each.upper()}" for each in ("host", "network")
    )
    for fetching, flag in ((nowhere, f"no URLs are fetched without {host}: send the file in base64"),
                           (elsewhere, f"from 127.0.0.1:{site.port}: allow it by {host}"),
                           (private, f"none in {network}"),
                           (Fetcher(SglangSettings()), "without --allow-image-host: send")):  # fmt: skip
        error = await refused(fetching, site.url("/"))
        assert (error.code, flag in str(error)) == ("image_url_refused", True)
    assert site.requests == []


async def test_a_name_is_resolved_once(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name server that answers with a public address first and a private one later gains nothing."""
    asked: list[str] = []
    loop = asyncio.get_running_loop()
    original = loop.getaddrinfo

    async def rebinding(host: Any, port: Any, **options: Any) -> Any:
        if host == "rebind.example":
            asked.append(host)
            address = "127.0.0.1" if len(asked) == 1 else "127.0.0.9"
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))]
        return await original(host, port, **options)

    monkeypatch.setattr(loop, "getaddrinfo", rebinding)
    host = f"rebind.example:{site.port}"
    fetching = fetcher(site, host, networks=("127.0.0.1/32",))
    assert await fetching.fetch(f"http://{host}/", "p") == IMAGE
    assert len(asked) == 1
    error = await refused(fetching, f"http://{host}/")  # a connection of its own, checked anew
    assert "no public address" in str(error)


async def test_redirects(site: Site) -> None:
    fetching = fetcher(site)
    assert await fetching.fetch(site.url("/to//cat.jpg"), "p") == IMAGE
    assert await fetching.fetch(site.url(f"/to/{site.url('/cat.jpg')}"), "p") == IMAGE
    for location in ("http://other.example/", "http://127.0.0.1:1/", "file:///etc/passwd"):
        assert "p: " in str(await refused(fetcher(site), site.url(f"/to/{location}")))
    error = await refused(fetcher(site), site.url("/to/" * 5 + "x"))
    assert "more than 3 redirects" in str(error)


async def test_redirects_are_checked_like_the_first_url(site: Site) -> None:
    other, server = await started()
    hosts = (f"127.0.0.1:{site.port}", f"127.0.0.2:{other.port}")
    fetching = fetcher(site, *hosts, networks=("127.0.0.1/32",))
    error = await refused(fetching, site.url(f"/to/{other.url('/', '127.0.0.2')}"))
    assert "no public address" in str(error)
    assert other.requests == []
    server.close()


@pytest.mark.parametrize(
    ("path", "code", "reason"),
    [
        ("/endless", "image_too_large", str(LIMIT)),
        ("/short", "image_fetch_failed", ""),
        ("/garbage", "image_fetch_failed", ""),
        ("/nothing", "image_fetch_failed", ""),
        ("/missing", "image_fetch_failed", "404"),
    ],
)
async def test_bad_responses(site: Site, path: str, code: str, reason: str) -> None:
    error = await refused(fetcher(site), site.url(path))
    assert error.code == code
    assert reason in str(error)


async def test_memory_is_held_as_bytes_arrive(site: Site) -> None:
    """Not once all have arrived: many fetches at a time would exceed the limit by all of theirs."""
    held: list[int] = []

    def hold(count: int) -> None:
        if sum(held) + count > LIMIT // 2:
            raise overloaded("full", "router_overloaded")
        held.append(count)

    fetching = fetcher(site)
    assert await fetching.fetch(site.url("/cat.png"), "p", held.append) == IMAGE
    assert sum(held) == len(IMAGE)
    held.clear()
    with pytest.raises(ApiError) as caught:
        await fetching.fetch(site.url("/endless"), "p", hold)
    assert (caught.value.code, sum(held) <= LIMIT // 2) == ("router_overloaded", True)
    await fetching.close()


async def test_slow_responses(site: Site) -> None:
    assert "longer than 0.3 s" in str(await refused(fetcher(site, seconds=0.3), site.url("/slow")))


async def test_nobody_listens(site: Site) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        error = await refused(fetcher(site, f"127.0.0.1:{port}"), f"http://127.0.0.1:{port}/")
    assert error.code == "image_fetch_failed"


async def test_certificates_are_checked_for_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("localhost").configure_cert(tls)
    site, server = await started(tls)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    assert await fetcher(site).fetch(site.url("/", "localhost", "https"), "p") == IMAGE
    assert "certificate" in str(await refused(fetcher(site), site.url("/", "127.0.0.1", "https"))).lower()
    downgrade = f"/to/{site.url('/', 'localhost', 'http')}"
    assert "https to http" in str(await refused(fetcher(site), site.url(downgrade, "localhost", "https")))
    server.close()


@pytest.mark.parametrize(
    ("path", "user", "reason"),
    [
        ("/missing", "", "the file cannot be fetched: status 404"),
        ("/to/secret://x?secret", "", "expected a data:"),
        ("/to/http://10.0.0.1/secret", "", "may not be fetched from 10.0.0.1:80"),
        ("/cat.jpg", "me:secret@", "the URL has a user name or password"),
    ],
)
async def test_a_failure_is_in_the_log_without_secrets(
    site: Site, caplog: pytest.LogCaptureFixture, path: str, user: str, reason: str
) -> None:
    await refused(fetcher(site), site.url(path, f"{user}127.0.0.1"))
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith(f"http://127.0.0.1:{site.port}: p: ")
    assert reason in record.getMessage()
    assert "secret" not in record.getMessage()


@pytest.mark.parametrize("url", ["http://\n", "http://a\nERROR b/", "nonsense", "http://" + "a" * 5000])
async def test_a_log_line_is_one_short_line(site: Site, caplog: pytest.LogCaptureFixture, url: str) -> None:
    await refused(fetcher(site), url)
    (record,) = caplog.records
    assert "\n" not in record.getMessage()
    assert len(record.getMessage()) < 10_000
