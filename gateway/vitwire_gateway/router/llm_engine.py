"""The engine's HTTP server. Requests and responses pass without cookies, redirects, decompression or buffering."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import httpx2

from vitwire.shared.named_files import trusting
from vitwire_gateway.api_errors import ApiError
from vitwire_gateway.gateway_settings import RouterSettings
from vitwire_gateway.requests.filling import Filled

Headers = list[tuple[bytes, bytes]]

_HOP_BY_HOP = frozenset(
    (b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te",
     b"trailer", b"transfer-encoding", b"upgrade")
)  # fmt: skip
_SET_HERE = _HOP_BY_HOP | {b"host", b"content-length", b"expect"}
_IDLE_SECONDS = 2.0
"""Less than engines keep idle connections (5 s), so that none is used while the engine closes it."""
_PROBE_SECONDS = 2.0


class Engine:
    """Sends requests to the engine."""

    def __init__(self, settings: RouterSettings) -> None:
        """Raises ValueError for a file without certificates."""
        self._base = httpx2.URL(settings.engine_url.rstrip("/"))
        self._name = self._base.netloc.decode()  # without a password
        self._health_path = settings.engine_health_path
        connect, wait = settings.engine_connect_seconds, settings.engine_seconds
        self._timeouts: dict[str, float | None] = {"connect": connect, "read": wait, "write": wait, "pool": None}
        self._transport = httpx2.AsyncHTTPTransport(
            verify=trusting("--engine-ca", ca) if (ca := settings.engine_ca) else httpx2.create_ssl_context(),
            limits=httpx2.Limits(keepalive_expiry=_IDLE_SECONDS),
            retries=1,  # of connecting, never of a request
        )

    @asynccontextmanager
    async def send(
        self, method: str, target: bytes, headers: Headers, body: bytes | Filled
    ) -> AsyncIterator[httpx2.Response]:
        """The response to a request, its body not yet read. Leaving the block ends the request.

        `target` is the path and query, sent byte for byte. Raises ApiError if the engine does not respond.
        """
        request = httpx2.Request(
            method,
            self._base,
            headers=headers if isinstance(body, bytes) else [*headers, (b"content-length", str(len(body)).encode())],
            content=body if isinstance(body, bytes) else _pieces(body),
            extensions={"timeout": self._timeouts, "target": self._base.raw_path.rstrip(b"/") + target},
        )
        try:
            response = await self._transport.handle_async_request(request)
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            text = f"the engine at {self._name} cannot be reached: {str(error) or type(error).__name__}"
            raise ApiError(503, text, "engine_unavailable") from error
        except httpx2.TransportError as error:
            raise from_transport(error) from error
        try:
            if not 200 <= response.status_code < 600:
                message = f"the engine answered with status {response.status_code}, which HTTP does not define"
                raise ApiError(502, message, "engine_failed")
            yield response
        finally:
            await response.aclose()

    async def probe(self) -> str:
        """`ok`, `not asked` without a path for it, or why the engine is not ready."""
        if not self._health_path:
            return "not asked"
        try:
            path = self._health_path.encode()
            async with asyncio.timeout(_PROBE_SECONDS), self.send("GET", path, [], b"") as response:
                status = response.status_code
        except (ApiError, TimeoutError) as error:
            return str(error) or "the engine did not respond in time"
        return "ok" if status == 200 else f"the engine's {self._health_path} returned {status}"

    async def close(self) -> None:
        await self._transport.aclose()


async def _pieces(body: Filled) -> AsyncIterator[bytes]:
    """A request as it is sent; others run between pieces."""
    for piece in body:
        yield bytes(piece)


def forwarded(headers: Iterable[tuple[bytes, bytes]], *, without: Iterable[bytes] = ()) -> Headers:
    """A caller's headers as they go to the engine."""
    headers = list(headers)
    dropped = _SET_HERE | _named_by_connection(headers) | set(without)
    return [(name, value) for name, value in headers if name not in dropped]


def returned(response: httpx2.Response) -> Headers:
    """The engine's headers as they go to the caller."""
    headers = [(name.lower(), value) for name, value in response.headers.raw]
    dropped = _HOP_BY_HOP | _named_by_connection(headers) | {b"date", b"x-request-id"}
    if any(name == b"transfer-encoding" for name, _ in headers):
        dropped |= {b"content-length"}  # HTTP ignores it then
    return [(name, value) for name, value in headers if name not in dropped]


def is_of_events(response: httpx2.Response) -> bool:
    """True for a stream of events, which begins before the engine has computed anything."""
    return bool(response.headers.get("content-type", "").startswith("text/event-stream"))


def from_transport(error: httpx2.TransportError) -> ApiError:
    """The error for an engine that broke off a connection."""
    reason = str(error) or type(error).__name__
    if isinstance(error, httpx2.TimeoutException):
        return ApiError(504, "the engine did not respond in time", "engine_timeout")
    return ApiError(502, f"the engine closed the connection: {reason}", "engine_failed")


def _named_by_connection(headers: Headers) -> set[bytes]:
    """Headers that `Connection` declares to be hop-by-hop."""
    return {option.strip().lower() for name, value in headers if name == b"connection" for option in value.split(b",")}
