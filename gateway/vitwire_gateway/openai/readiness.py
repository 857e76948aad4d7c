"""Whether requests can be answered: encoder and engine are ready, and the router is not draining."""

import asyncio
import time
from dataclasses import dataclass, field

from vitwire import AsyncClient, VitwireError
from vitwire_gateway.openai.encoding import Description
from vitwire_gateway.openai.upstream import Engine

_PROBE_SECONDS = 2.0
_KEPT_SECONDS = 1.0
"""For how long an answer is kept, so that probes of many balancers cost one."""


@dataclass(slots=True)
class Readiness:
    """Asks encoder and engine, at most once a second."""

    client: AsyncClient
    engine: Engine
    storing: Description | None = None
    """Of an encoder whose rows the engine fetches, so that it must keep them; None if requests carry the rows."""
    is_draining: bool = False
    _until: float = 0.0
    _answer: dict[str, str] = field(default_factory=dict)
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def report(self) -> dict[str, str]:
        """`status` is `ready`, `not ready` or `draining`; the rest says what encoder and engine reported."""
        async with self._lock:
            if time.monotonic() >= self._until:
                encoder, engine = await asyncio.gather(self._encoder(), self.engine.probe())
                ready = encoder == "SERVING" and engine == "ok"
                self._answer = {"status": "ready" if ready else "not ready", "encoder": encoder, "engine": engine}
                self._until = time.monotonic() + _KEPT_SECONDS
        return self._answer | ({"status": "draining"} if self.is_draining else {})

    async def _encoder(self) -> str:
        try:
            status = await self.client.health(timeout=_PROBE_SECONDS)
            if status == "SERVING" and self.storing and not (await self.storing.current()).limits.cached_bytes:
                return "SERVING without --cache-bytes, which --mode reference needs"
            return status
        except VitwireError as error:
            return str(error)
