"""Callers of a router at several addresses of loopback."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx2

from routers import CHAT, RouterProcess

_SECONDS = 120


@contextmanager
def caller(proxy: RouterProcess, address: str) -> Iterator[httpx2.Client]:
    transport = httpx2.HTTPTransport(local_address=address)
    with httpx2.Client(base_url=proxy.url, transport=transport, timeout=_SECONDS) as client:
        yield client


def ask(proxy: RouterProcess, address: str, path: str = CHAT, **content: Any) -> int:
    """The status of a request."""
    with caller(proxy, address) as client:
        return client.post(path, **content).status_code
