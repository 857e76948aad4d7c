"""Bodies of requests, as they arrive."""

from collections.abc import Callable

from starlette.requests import Request

from vitwire_gateway.openai.errors import ApiError
from vitwire_gateway.openai.shares import Holding


async def read_body(
    request: Request, holding: Holding, take: Callable[[int], None], max_bytes: int, seconds: float
) -> bytes:
    """The request's body; `take` lets `holding` hold its bytes. Raises ApiError, or ClientDisconnect.

    While others need its bytes, or the process drains, a body must arrive at 64 KiB/s.
    """
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    try:
        async with holding.losable(seconds):
            async for chunk in request.stream():
                if len(body) + len(chunk) > max_bytes:
                    raise _too_large(max_bytes)
                take(len(chunk))
                holding.advance(len(chunk))
                body += chunk
    except TimeoutError as error:
        raise ApiError(408, _too_slow(holding, seconds), "request_timeout") from error
    return bytes(body)


def _too_slow(holding: Holding, seconds: float) -> str:
    if holding.is_lost:
        return "the body arrived too slowly while others waited: send at least 64 KiB/s"
    return f"the body did not arrive within {seconds:g} s, or too slowly while the router ends"


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"the body exceeds the limit of {max_bytes} bytes", "request_too_large")
