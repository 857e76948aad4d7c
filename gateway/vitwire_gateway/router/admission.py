"""Admission of requests: by their key, their number and their bytes."""

import hashlib
import hmac
import logging
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from starlette.requests import Request

from vitwire.content_ids import read_content_key
from vitwire.shared.fairness.budgets import Budget, Holding
from vitwire.shared.fairness.hosts import host_name
from vitwire.shared.named_files import naming
from vitwire_flags.regular_files import read_regular
from vitwire_gateway.api_errors import ApiError, overloaded
from vitwire_gateway.callers import Caller
from vitwire_gateway.gateway_settings import RouterSettings
from vitwire_gateway.metrics import Metrics

logger = logging.getLogger("vitwire.router")

_MAX_KEY_BYTES = 16 << 20


class ApiKeys:
    """The keys in a file, as `read_keys` reads it. It is read again when it changes."""

    def __init__(self, file: Path) -> None:
        """Raises ValueError for a file without keys."""
        self._file = file
        self._seen: tuple[int, int, int] | None = None
        self._digests: list[bytes] = []
        self._failure = ""
        with naming("--api-keys-file", file):
            self._refresh()

    def check(self, authorization: str | None) -> str:
        """A name for the caller by its key, which it does not reveal. Raises ApiError for none of the keys."""
        self._follow()
        scheme, _, key = (authorization or "").partition(" ")
        digest = _digest(key.strip())
        # All are compared, so that the time taken says nothing about which one was close.
        found = [hmac.compare_digest(digest, each) for each in self._digests]
        if scheme.lower() != "bearer" or not any(found):
            message = "the API key is missing or wrong: send Authorization: Bearer KEY"
            raise ApiError(401, message, "invalid_api_key", headers={"www-authenticate": "Bearer"})
        return digest.hex()

    def _follow(self) -> None:
        """A file that cannot be used leaves the keys as they are."""
        try:
            with naming("--api-keys-file", self._file):
                self._refresh()
            self._failure = ""
        except ValueError as error:
            if (failure := str(error)) != self._failure:
                logger.warning("%s; the keys stay as they were", failure)
            self._failure = failure

    def _refresh(self) -> None:
        stat = self._file.stat()
        version = stat.st_mtime_ns, stat.st_size, stat.st_ino
        if version != self._seen:
            self._digests = [_digest(key) for key in read_keys(self._file)]
            self._seen = version


def read_keys(file: Path) -> list[str]:
    """The keys in a regular file, one per line, each with a name or not; lines that begin with `#` are comments.

    Raises OSError, also if it is larger than 16 MiB, and ValueError if it has none, or more words in a line.
    """
    keys = list[str]()
    for number, line in enumerate(read_regular(file, _MAX_KEY_BYTES).decode().splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) > 2:
            raise ValueError(f"line {number} has {len(words)} words: expected a key and at most a name")
        keys.append(words[0])
    if not keys:
        raise ValueError("the file has no keys: expected one per line")
    return keys


def engine_key_of(settings: RouterSettings) -> str | None:
    """The key that the engine gets. Raises ValueError for a file without one."""
    file = settings.engine_api_key_file
    if file is None:
        return None
    with naming("--engine-api-key-file", file):
        return read_keys(file)[0]


def content_key_of(settings: RouterSettings) -> bytes:
    """The secret of ids: of its file, else empty for a random one. Raises ValueError if it cannot be used."""
    file = settings.content_key_file
    if settings.no_engine:  # nobody gets ids
        return b""
    if file is None:
        if (count := os.environ.get("WEB_CONCURRENCY", "1")) != "1":
            text = "workers with a random key each would name equal images differently: set --content-key-file"
            raise ValueError(f"WEB_CONCURRENCY={count}: {text}")
        logger.info("ids of images are made with a random key: several routers need one --content-key-file")
        return b""
    with naming("--content-key-file", file):
        return read_content_key(file)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class Ticket(NamedTuple):
    """A request that was let in."""

    caller: Caller
    place: Holding
    """Takes 1 once the request's body has arrived. Raises ApiError if there are too many."""
    bytes: Holding
    """Bytes of body and images. Raises ApiError if the router has none left."""


class Admission:
    """The limits that all requests share; used by the event loop only."""

    def __init__(self, settings: RouterSettings, metrics: Metrics) -> None:
        """Raises ValueError for a file without keys."""

        def refused(reason: str, message: str) -> ApiError:
            metrics.rejected.labels(reason).inc()
            return overloaded(message, "router_overloaded")

        many = "as many requests are in flight already as may be, or as one caller may have"
        much = "the router holds as many bytes of requests as it may"
        self.is_draining = False
        """Readiness reports so, though requests are still let in."""
        self.keys = ApiKeys(settings.api_keys_file) if settings.api_keys_file else None
        self.bytes = Budget(settings.max_buffered_bytes, lambda: refused("bytes", much))
        self._requests = Budget(settings.max_requests, lambda: refused("requests", many))
        metrics.inflight.set_function(lambda: self._requests.used)
        metrics.buffered.set_function(lambda: self.bytes.used)

    @asynccontextmanager
    async def admitted(self, request: Request) -> AsyncGenerator[Ticket, None]:
        """A request for the time of the block; it holds nothing until its body arrives.

        Raises ApiError for a wrong key, and at once if there are too many in flight.
        """
        if self.keys:
            name = self.keys.check(request.headers.get("authorization"))
        else:
            name = host_name(request.client.host) if request.client else ""
        self._requests.check(name)
        async with self._requests.holding(name) as place, self.bytes.holding(name) as held:
            yield Ticket(Caller.of(name), place, held)
