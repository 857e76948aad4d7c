"""The answer of `/health`, and the log of its changes."""

import asyncio
import logging
from contextlib import suppress

from vitwire import VitwireError
from vitwire.shared.recent import Recent
from vitwire_gateway.gateway_settings import RouterSettings
from vitwire_gateway.images.encoding import NO_CACHE, Encoder
from vitwire_gateway.router.llm_engine import Engine

logger = logging.getLogger("vitwire.router")

_PROBE_SECONDS = 2.0
_KEPT_SECONDS = 1.0
"""For how long an answer is kept, so that probes of many balancers cost one."""
_NO_POOLING = "the encoder pools no vectors: each image has several; start it with --pooling for one"


class Readiness:
    """Whether requests can be answered; encoder and engine are probed only if asked for."""

    def __init__(self, settings: RouterSettings, encoder: Encoder, engine: Engine) -> None:
        self._settings = settings
        self._encoder = encoder
        self._engine = engine
        self._was = "ready"
        self._is_pooling_known = not settings.no_engine
        """Or of no interest, as vectors are not all that is answered."""
        self._recent = Recent(self._probed, _KEPT_SECONDS)

    async def report(self) -> dict[str, str]:
        """`status`, which is `ready` or `not ready`, and the states of encoder and engine."""
        return await self._recent.get()

    async def _probed(self) -> dict[str, str]:
        settings = self._settings
        needs_cache = settings.mode == "reference"
        probe = self._encoder.probe(_PROBE_SECONDS, settings.refusal, needs_cache=needs_cache)
        if settings.no_engine:
            states = {"encoder": await probe}
        else:
            of_encoder, of_engine = await asyncio.gather(probe, self._engine.probe())
            states = {"encoder": of_encoder, "engine": of_engine}
        is_encoding = states["encoder"] == "SERVING"
        falls_back = settings.on_encoder_failure == "engine" and states["encoder"] not in (settings.refusal, NO_CACHE)
        is_ready = states.get("engine", "ok") in ("ok", "not asked") and (is_encoding or falls_back)
        state = "not ready" if not is_ready else "ready" if is_encoding else "ready, the engine encodes images"
        if state != self._was:
            text = ", ".join(f"{name}: {each}" for name, each in states.items())
            level, again = (logging.INFO, " again") if state == "ready" else (logging.WARNING, "")
            logger.log(level, "%s%s: %s", state, again, text)
        self._was = state
        if is_ready and not self._is_pooling_known:
            await self._check_pooling()
        return {"status": "ready" if is_ready else "not ready", **states}

    async def _check_pooling(self) -> None:
        with suppress(VitwireError):
            if (await self._encoder.model.get()).pooling == "none":  # kept since the probe
                logger.warning(_NO_POOLING)
            self._is_pooling_known = True
