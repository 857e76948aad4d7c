"""Images fetched from URLs: only from allowed hosts, never from private addresses, bounded in bytes and time.

The address that was checked is the one that is connected to, so a name that resolves anew to another address (DNS
rebinding) gains nothing. Redirects are followed by hand, each checked like the first URL.
"""

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import httpcore2
import httpx2

from vitwire_gateway.openai.addresses import Address, AllowedHost, Network, is_permitted
from vitwire_gateway.openai.errors import ApiError, invalid
from vitwire_gateway.openai.uploads import too_large

Hold = Callable[[int], None]
"""Takes memory for bytes; raises ApiError if there is none left."""

_MAX_REDIRECTS = 3
_MAX_CONNECTIONS = 64
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_HEADERS = ((b"user-agent", b"vitwire-router"), (b"accept", b"image/*"), (b"accept-encoding", b"identity"))


class _ForbiddenAddress(Exception):
    """The host has no address that may be connected to."""


class _CheckedBackend(httpcore2.AnyIOBackend):
    """Resolves a host once, and connects to an address that `is_permitted`."""

    def __init__(self, networks: Iterable[Network]) -> None:
        super().__init__()
        self._networks = tuple(networks)

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109  # the base's signature
        local_address: str | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        permitted = [each for each in await _addresses(host, port) if is_permitted(each, self._networks)]
        if not permitted:
            raise _ForbiddenAddress
        for address in permitted[:-1]:
            try:
                return await super().connect_tcp(str(address), port, timeout, local_address, socket_options)
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout):
                continue
        return await super().connect_tcp(str(permitted[-1]), port, timeout, local_address, socket_options)


async def _addresses(host: str, port: int) -> list[Address]:
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise httpcore2.ConnectError(f"cannot resolve {host}") from error
    return [ipaddress.ip_address(each[4][0]) for each in found]


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """What URLs may name, and how much may be fetched from them."""

    hosts: tuple[AllowedHost, ...]
    networks: tuple[Network, ...]
    max_bytes: int
    seconds: float


class Fetcher:
    """Fetches images from URLs within limits."""

    def __init__(self, limits: FetchLimits) -> None:
        self._limits = limits
        self._pool = httpcore2.AsyncConnectionPool(
            ssl_context=httpx2.create_ssl_context(),
            max_connections=_MAX_CONNECTIONS,
            max_keepalive_connections=0,
            network_backend=_CheckedBackend(limits.networks),
        )

    async def fetch(self, url: str, param: str, hold: Hold | None = None) -> bytes:
        """The image at the URL. Raises ApiError, also that of `hold` for bytes as they arrive."""
        if not self._limits.hosts:
            raise invalid(
                "this router fetches no URLs; send the image as data:image/...;base64,...", param, "image_url_refused"
            )
        try:
            async with asyncio.timeout(self._limits.seconds):
                return await self._follow(url, param, hold or (lambda _: None))
        except TimeoutError as error:
            raise _failed(f"it took longer than {self._limits.seconds:g} s", param) from error
        except _ForbiddenAddress as error:
            raise invalid("the host has no public address", param, "image_url_refused") from error
        except httpcore2.UnsupportedProtocol as error:
            raise invalid("expected an http:// or https:// URL", param, "invalid_image_url") from error
        except (httpcore2.NetworkError, httpcore2.ProtocolError, httpcore2.TimeoutException, OSError) as error:
            raise _failed(str(error) or type(error).__name__, param) from error

    async def close(self) -> None:
        """Close all connections."""
        await self._pool.aclose()

    async def _follow(self, url: str, param: str, hold: Hold) -> bytes:
        target = self._checked(url, param)
        for _ in range(1 + _MAX_REDIRECTS):
            found = await self._get(target, param, hold)
            if isinstance(found, bytes):
                return found
            if target.scheme == "https" and found.scheme == "http":
                raise invalid("it redirects from https to http", param, "image_url_refused")
            target = self._checked(str(found), param)
        raise _failed(f"more than {_MAX_REDIRECTS} redirects", param)

    def _checked(self, text: str, param: str) -> httpx2.URL:
        """The URL, if its scheme, host and port are allowed."""
        try:
            url = httpx2.URL(text)
            host = url.raw_host.decode("ascii")
        except (httpx2.InvalidURL, UnicodeError, ValueError) as error:
            raise invalid(f"not a URL: {error}", param, "invalid_image_url") from error
        if url.scheme not in ("http", "https") or not host:
            raise invalid("expected a data:, http:// or https:// URL", param, "invalid_image_url")
        if url.userinfo:
            raise invalid("the URL has a user name or password", param, "image_url_refused")
        port = url.port or (443 if url.scheme == "https" else 80)
        if not any(each.matches(host, port) for each in self._limits.hosts):
            raise invalid(f"images may not be fetched from {host}:{port}", param, "image_url_refused")
        return url

    async def _get(self, url: httpx2.URL, param: str, hold: Hold) -> bytes | httpx2.URL:
        """The image, or where the response redirects to."""
        seconds = self._limits.seconds
        timeouts = dict.fromkeys(("connect", "read", "write", "pool"), seconds)
        target = httpcore2.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path)
        headers = [(b"host", url.netloc), *_HEADERS]
        async with self._pool.stream("GET", target, headers=headers, extensions={"timeout": timeouts}) as response:
            if response.status in _REDIRECTS:
                locations = [value for name, value in response.headers if name.lower() == b"location"]
                return _joined(url, locations[0] if locations else b"", param)
            if response.status != 200:
                raise _failed(f"status {response.status}", param)
            image = bytearray()
            async for chunk in response.aiter_stream():
                if len(image) + len(chunk) > self._limits.max_bytes:
                    raise too_large(self._limits.max_bytes, param)
                hold(len(chunk))
                image += chunk
            return bytes(image)


def _joined(url: httpx2.URL, location: bytes, param: str) -> httpx2.URL:
    try:
        return url.join(location.decode("ascii"))
    except (httpx2.InvalidURL, UnicodeError, ValueError) as error:
        raise _failed("it redirects to an invalid URL", param) from error


def _failed(reason: str, param: str) -> ApiError:
    return invalid(f"the image cannot be fetched: {reason}", param, "image_fetch_failed")
