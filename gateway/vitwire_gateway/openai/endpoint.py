"""The boundary of every request: admission, keys, errors, metrics, and one line of log."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from vitwire_gateway.openai.admission import Admission, Ticket
from vitwire_gateway.openai.errors import ApiError
from vitwire_gateway.openai.exchange import Exchange
from vitwire_gateway.openai.keys import ApiKeys
from vitwire_gateway.openai.metrics import Metrics
from vitwire_gateway.openai.settings import Settings
from vitwire_gateway.openai.shares import Caller, host_name

logger = logging.getLogger("vitwire.router")

_UPSTREAMS = ("encoder", "engine")
"""What the codes of their errors begin with."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An ASGI application around one way to answer requests."""

    route: Literal["chat", "proxied"]
    answer: Callable[[Exchange, Ticket], Awaitable[None]]
    admission: Admission
    keys: ApiKeys | None
    metrics: Metrics
    settings: Settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, self.settings.stall_seconds)
        began = time.perf_counter()
        outcome = "done"
        try:
            await self._answered(exchange)
        except ApiError as error:
            outcome = error.code
            self._failed(error)
            await exchange.refuse(error)
        except ClientDisconnect:
            outcome = "client disconnected"
            self.metrics.cancelled.labels(exchange.stage).inc()
        except asyncio.CancelledError:  # the time to drain is over: the connection is closed by returning
            outcome = "cut off by shutdown"
        except Exception:
            outcome = "internal error"
            logger.exception("request %s failed", exchange.request_id)
            await exchange.refuse(ApiError(500, "the router failed; its log has the reason", "internal_error"))
        finally:
            self.metrics.answered(self.route, exchange.status)
            self._log(exchange, outcome, time.perf_counter() - began)

    async def _answered(self, exchange: Exchange) -> None:
        exchange.check_head(self.settings.max_header_bytes)
        async with self.admission.request(Caller.of(self._name(exchange))) as ticket:
            await self.answer(exchange, ticket)

    def _name(self, exchange: Exchange) -> str:
        """The caller's, by its key if keys are checked, else by its address. Raises ApiError."""
        if self.keys:
            return self.keys.check(exchange.request.headers.get("authorization"))
        client = exchange.request.client
        return host_name(client.host) if client else ""

    def _failed(self, error: ApiError) -> None:
        upstream = error.code.partition("_")[0]
        if upstream in _UPSTREAMS:
            self.metrics.failures.labels(upstream, error.code).inc()

    def _log(self, exchange: Exchange, outcome: str, seconds: float) -> None:
        request = exchange.request
        logger.info(
            "%s %s %s %d %s images=%d %.1f ms",
            exchange.request_id,
            request.method,
            request.scope["path"].encode("unicode_escape").decode(),
            exchange.status,
            outcome,
            exchange.images,
            seconds * 1e3,
        )
