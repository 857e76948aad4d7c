"""Bodies of requests as they arrive, and the JSON in them."""

import json
from encodings import utf_8_sig, utf_16_be, utf_16_le, utf_32_be, utf_32_le  # noqa: F401  # workers cannot import
from typing import Any

from starlette.requests import Request

from vitwire.shared.fairness.budgets import Holding
from vitwire_gateway.api_errors import ApiError, invalid
from vitwire_gateway.gateway_settings import GatewaySettings

Json = dict[str, Any]

_SMALL_BYTES = 64 << 10
_FEW_COMMAS = 2000
_MAX_DIGITS = 400
"""Digits of an integer: reading one takes time in the square of its digits."""
_MAX_VALUES = 1_000_000
"""Values of a request; each costs up to 100 bytes and 0.2 us, so that 64 MiB of them would take gigabytes."""


def is_small(body: bytes) -> bool:
    """True for a body that is read on the event loop, in a few milliseconds at most; others are read in a worker."""
    return len(body) <= _SMALL_BYTES and body.count(b",") <= _FEW_COMMAS


async def read_body(request: Request, holding: Holding, settings: GatewaySettings, seconds: float) -> bytes:
    """The request's body, whose bytes `holding` takes. Raises ApiError, the budget's refusal, or ClientDisconnect.

    While others need its bytes, or the process drains, a body must arrive at 64 KiB/s.
    """
    max_bytes = settings.max_body_bytes
    text = f"the body exceeds the limit of {max_bytes} bytes ({settings.named('max_body_bytes')})"
    too_large = ApiError(413, text, "request_too_large")
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise too_large
    body = bytearray()
    try:
        async with holding.losable(seconds):
            async for chunk in request.stream():
                if len(body) + len(chunk) > max_bytes:
                    raise too_large
                holding.take(len(chunk))
                holding.advance(len(chunk))
                body += chunk
    except TimeoutError as error:
        if holding.is_lost:
            text = "the body arrived too slowly while others waited: send at least 64 KiB/s"
        else:
            text = (
                f"the body did not arrive within {seconds:g} s, or came too slowly while the router was shutting down"
            )
        raise ApiError(408, text, "request_timeout") from error
    return bytes(body)


def parse(body: bytes | bytearray) -> Json:
    """The JSON object in a body. Raises ApiError if it is none, or one of too many values."""
    if sum(body.count(each) for each in b",:[{") > _MAX_VALUES:
        raise invalid(f"the body has more than {_MAX_VALUES} values", None, "invalid_json")
    try:
        request = json.loads(body, parse_constant=_refuse_constant, parse_int=_integer)
    except (ValueError, RecursionError) as error:
        raise invalid(f"the body is not valid JSON: {error}", None, "invalid_json") from error
    if not isinstance(request, dict):
        raise invalid("the body is not a JSON object", None, "invalid_json")
    return request


def _integer(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"an integer of {len(digits)} digits, the limit is {_MAX_DIGITS}")
    return int(digits)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")
