"""Errors in OpenAI's form, and how errors of the encoder map to them."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Self

from vitwire import DeadlineExceeded, InvalidItem, Overloaded, Unauthenticated, Unavailable, VitwireError

_RETRY_SECONDS = 1.0
_MAX_MESSAGE = 500
"""Characters of a message that a worker sends."""
_TYPES = {401: "authentication_error", 429: "rate_limit_error"}


@dataclass(eq=False)
class ApiError(Exception):
    """An error response: `{"error": {"message", "type", "param", "code"}}`. SGLang gets status and message only."""

    status: int
    message: str
    code: str = "invalid_value"
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[type[Self], tuple[int, str, str, str | None]]:
        return type(self), (self.status, self.message[:_MAX_MESSAGE], self.code, self.param)

    @property
    def body(self) -> bytes:
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return json.dumps({"error": error}).encode()

    def at(self, param: str) -> "ApiError":
        """The same error of an equal image at another place."""
        return replace(self, message=self.message.replace(self.param or param, param, 1), param=param)


def invalid(message: str, param: str | None, code: str = "invalid_value") -> ApiError:
    """The request is wrong at `param`."""
    return ApiError(400, f"{param}: {message}" if param else message, code, param)


def released(error: BaseException) -> None:
    """Free what the frames hold that an error passed, such as files: errors are often in cycles with frames."""
    error.__traceback__ = None
    if earlier := error.__cause__ or error.__context__:
        released(earlier)


def of_clip(error: ApiError) -> ApiError:
    """The error, with a code that names clips in place of images."""
    return replace(error, code=error.code.replace("image", "clip"))


def overloaded(message: str, code: str, retry_after: float | None = None) -> ApiError:
    """The caller should come back later."""
    seconds = math.ceil(max(_RETRY_SECONDS, retry_after or 0.0))
    return ApiError(429, message, code, headers={"retry-after": str(seconds)})


def from_encoder(error: VitwireError, param: str | None, refusal: str) -> ApiError:
    """The error of the encoder for the image at `param`; `refusal` is the message for a refused token."""
    match error:
        case InvalidItem():
            reasons = "; ".join(each.description for each in error.violations)
            return invalid(reasons or str(error), param, "invalid_image")
        case Overloaded():
            return overloaded(f"the encoder is overloaded: {error}", "encoder_overloaded", error.retry_after)
        case DeadlineExceeded():
            return ApiError(504, f"the encoder did not answer in time: {error}", "encoder_timeout")
        case Unavailable():
            return ApiError(503, f"the encoder is not available: {error}", "encoder_unavailable")
        case Unauthenticated():
            return ApiError(502, refusal, "encoder_refused")
        case _:
            return ApiError(502, f"the encoder failed: {error}", "encoder_failed", param)
