"""Files fetched from URLs: only from allowed hosts, never from private addresses, bounded in bytes and time.

The address that was checked is the one that is connected to, so a name that resolves anew to another address (DNS
rebinding) gains nothing. Redirects are followed by hand, each checked like the first URL.
"""

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Callable, Iterable

import httpcore2
import httpx2

from vitwire_gateway.api_errors import ApiError, invalid
from vitwire_gateway.gateway_settings import GatewaySettings
from vitwire_gateway.images.image_hosts import AllowedHost, Network, is_permitted, parse_networks

logger = logging.getLogger("vitwire.images")

Hold = Callable[[int], None]
"""Takes memory for bytes; raises ApiError if there is none left."""

_MAX_REDIRECTS = 3
_MAX_CONNECTIONS = 64
_MAX_ORIGIN = 256
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_HEADERS = ((b"user-agent", b"vitwire-router"), (b"accept", b"image/*, video/*"), (b"accept-encoding", b"identity"))


class _ForbiddenAddress(Exception):
    """The host has no address that may be connected to."""


class _CheckedBackend(httpcore2.AnyIOBackend):
    """Resolves a host once, and connects only to its addresses that `is_permitted`."""

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
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise httpcore2.ConnectError(f"cannot resolve {host}") from error
        failure: Exception = _ForbiddenAddress()
        for address in (ipaddress.ip_address(each[4][0]) for each in found):
            if is_permitted(address, self._networks):
                try:
                    return await super().connect_tcp(str(address), port, timeout, local_address, socket_options)
                except (httpcore2.ConnectError, httpcore2.ConnectTimeout) as error:
                    failure = error
        raise failure


class Fetcher:
    """Fetches files from URLs within the limits of settings."""

    def __init__(self, settings: GatewaySettings) -> None:
        """Raises ValueError for hosts and networks that cannot be understood."""
        self._hosts = [AllowedHost.parse(each) for each in settings.allow_image_host]
        self._settings = settings
        self._seconds = settings.fetch_seconds
        self._pool = httpcore2.AsyncConnectionPool(
            ssl_context=httpx2.create_ssl_context(),
            max_connections=_MAX_CONNECTIONS,
            max_keepalive_connections=0,
            network_backend=_CheckedBackend(parse_networks(settings.allow_image_network)),
        )

    async def fetch(self, url: str, param: str | None, hold: Hold | None = None) -> bytes:
        """The file at the URL. Raises ApiError; `hold`, called as bytes arrive, may too. A failure is logged."""
        if not self._hosts:
            text = f"no URLs are fetched without {self._settings.named('allow_image_host')}: send the file in base64"
            raise invalid(text, param, "image_url_refused")
        try:
            return await self._fetched(url, param, hold or (lambda _: None))
        except ApiError as error:
            if error.status == 400:
                logger.warning("%s: %s", _origin(url), str(error).encode("unicode_escape").decode())
            raise

    async def close(self) -> None:
        await self._pool.aclose()

    async def _fetched(self, url: str, param: str | None, hold: Hold) -> bytes:
        try:
            async with asyncio.timeout(self._seconds):
                return await self._follow(url, param, hold)
        except TimeoutError as error:
            raise _failed(f"it took longer than {self._seconds:g} s", param) from error
        except _ForbiddenAddress as error:
            text = f"the host has no public address, and none in {self._settings.named('allow_image_network')}"
            raise invalid(text, param, "image_url_refused") from error
        except (httpcore2.NetworkError, httpcore2.ProtocolError, httpcore2.TimeoutException, OSError) as error:
            raise _failed(str(error) or type(error).__name__, param) from error

    async def _follow(self, url: str, param: str | None, hold: Hold) -> bytes:
        target = self._checked(url, param)
        for _ in range(1 + _MAX_REDIRECTS):
            found = await self._get(target, param, hold)
            if isinstance(found, bytes):
                return found
            if target.scheme == "https" and found.scheme == "http":
                raise invalid("it redirects from https to http", param, "image_url_refused")
            target = self._checked(str(found), param)
        raise _failed(f"more than {_MAX_REDIRECTS} redirects", param)

    def _checked(self, text: str, param: str | None) -> httpx2.URL:
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
        if not any(each.matches(host, port) for each in self._hosts):
            flag = self._settings.named("allow_image_host")
            text = f"files may not be fetched from {host}:{port}: allow it by {flag}"
            raise invalid(text, param, "image_url_refused")
        return url

    async def _get(self, url: httpx2.URL, param: str | None, hold: Hold) -> bytes | httpx2.URL:
        """The file, or where the response redirects to."""
        timeouts = dict.fromkeys(("connect", "read", "write", "pool"), self._seconds)
        target = httpcore2.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path)
        headers = [(b"host", url.netloc), *_HEADERS]
        async with self._pool.stream("GET", target, headers=headers, extensions={"timeout": timeouts}) as response:
            if response.status in _REDIRECTS:
                locations = [value for name, value in response.headers if name.lower() == b"location"]
                try:
                    return url.join(locations[0].decode("ascii") if locations else "")
                except (httpx2.InvalidURL, UnicodeError, ValueError) as error:
                    raise _failed("it redirects to an invalid URL", param) from error
            if response.status != 200:
                raise _failed(f"status {response.status}", param)
            file = bytearray()
            async for chunk in response.aiter_stream():
                if len(file) + len(chunk) > self._settings.max_image_bytes:
                    raise too_large(self._settings.max_image_bytes, self._settings.named("max_image_bytes"), param)
                hold(len(chunk))
                file += chunk
            return bytes(file)


def _origin(url: str) -> str:
    """What a log may have of a URL: no user name, password, path or query, each of which may be a secret."""
    try:
        found = httpx2.URL(url)
        return f"{found.scheme}://{found.netloc.decode('ascii')}"[:_MAX_ORIGIN]
    except (httpx2.InvalidURL, UnicodeError, ValueError):
        return "a malformed URL"


def too_large(max_bytes: int, flag: str, param: str | None) -> ApiError:
    """The error for a file of more bytes than a flag allows."""
    return invalid(f"the file exceeds the limit of {max_bytes} bytes ({flag})", param, "image_too_large")


def _failed(reason: str, param: str | None) -> ApiError:
    return invalid(f"the file cannot be fetched: {reason}", param, "image_fetch_failed")
