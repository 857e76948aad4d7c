"""Properties that the RPCs of one request have in common: its id, metadata and retry policy."""

import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from uuid import uuid4

from vitwire._transport.attempts import Policy
from vitwire.errors import REQUEST_ID_KEY, VitwireError

log = logging.getLogger("vitwire")
"""The logger of the whole client; docs/client.md has its levels."""

Metadata = tuple[tuple[str, str], ...]
Token = str | Callable[[], str] | None

ACKNOWLEDGE = "x-vitwire-acknowledge"
"""Asks the server for its headers as soon as it accepts a call. Proxies repeat no call whose headers they passed on, so
only a client that repeats calls by itself asks for it."""
_KEY = re.compile(r"[a-z0-9_.-]+")


@dataclass(frozen=True, slots=True)
class Context:
    """The request id is in the server's logs and traces, and on errors and reports of the client."""

    request_id: str
    metadata: Metadata = field(repr=False)
    """With the token."""
    policy: Policy

    @classmethod
    def of(cls, token: Token, extra: Metadata, policy: Policy) -> "Context":
        """A new request. `extra` is metadata of the caller, which may have the id of the request.

        Raises ValueError if the token's function returns an invalid one.
        """
        request_id = dict(extra).get(REQUEST_ID_KEY) or uuid4().hex
        pairs = [(REQUEST_ID_KEY, request_id), (ACKNOWLEDGE, "1"), *_trace_context()]
        pairs += [pair for pair in extra if pair[0] != REQUEST_ID_KEY]
        if own := checked_token(token()) if callable(token) else token:
            pairs.append(("authorization", f"Bearer {own}"))
        return cls(request_id, tuple(pairs), policy)

    def name(self, error: VitwireError) -> VitwireError:
        """The error with the id of this request, unless the server sent another one."""
        error.request_id = error.request_id or self.request_id
        return error

    @contextmanager
    def naming_errors(self) -> Iterator[None]:
        """Errors that leave the block have the id of this request."""
        try:
            yield
        except VitwireError as error:
            self.name(error)
            raise


def checked_token(token: Token) -> Token:
    """The token. Raises ValueError, without the token in its message, if it is not valid in a header."""
    if isinstance(token, str) and not (token.isascii() and token.isprintable()):
        raise ValueError("the token has characters other than printable ASCII, such as a line break")
    if not (token is None or isinstance(token, str) or callable(token)):
        raise ValueError(f"token must be a string or a function that returns one, got {type(token).__name__}")
    return token


def checked_metadata(metadata: Mapping[str, str] | None, token: Token) -> Metadata:
    """The caller's metadata, with keys in lower case. Raises ValueError, without values, if gRPC would refuse it."""
    pairs = []
    for name, value in (metadata or {}).items():
        key = name.lower() if isinstance(name, str) else ""
        if not _KEY.fullmatch(key) or key.startswith("grpc-") or key.endswith("-bin"):
            raise ValueError(f"metadata: {name!r} is not a valid key: letters, digits and _.- without grpc- and -bin")
        if key == ACKNOWLEDGE or (key == "authorization" and token):
            raise ValueError(f"metadata: {name!r} is set by the client itself")
        if not (isinstance(value, str) and value.isascii() and value.isprintable()):
            raise ValueError(f"metadata: the value of {name!r} has characters other than printable ASCII")
        pairs.append((key, value))
    return tuple(pairs)


def _trace_context() -> Metadata:
    """The caller's span in W3C format, if the program has imported OpenTelemetry."""
    if "opentelemetry.trace" not in sys.modules:
        return ()
    from opentelemetry.trace.propagation.tracecontext import (  # noqa: PLC0415  # imported by the program
        TraceContextTextMapPropagator,
    )

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return tuple(carrier.items())
