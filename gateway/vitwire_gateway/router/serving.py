"""The process: logs, signals, listening and draining."""

import asyncio
import json
import logging
import signal
import socket
import sys
import time
from types import FrameType

import httpx2
import uvicorn
from starlette.applications import Starlette

from vitwire_gateway.connections import configured, listening
from vitwire_gateway.openai.parts import mode_of
from vitwire_gateway.router.application import application
from vitwire_gateway.settings import RouterSettings

logger = logging.getLogger("vitwire.router")

_KEEP_ALIVE_SECONDS = 75
"""Longer than callers keep idle connections, so that they close them, never in the middle of a request."""


class _Server(uvicorn.Server):
    """Announces its port.

    At SIGTERM, SIGINT or SIGHUP it reports that it is not ready, then drains; the second ends it.
    """

    def __init__(self, config: uvicorn.Config, app: Starlette, lame_duck_seconds: float) -> None:
        super().__init__(config)
        self._app = app
        self._lame_duck_seconds = lame_duck_seconds
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_ending = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup
            self._loop.add_signal_handler(signal.SIGHUP, self._hang_up)
        await super().startup(sockets)
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        logger.info("listening on %s:%d", host, port)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002  # the base's signature
        if self._loop is None or self._is_ending:
            self.should_exit = self.force_exit = True
            return
        self._is_ending = True
        self._loop.call_soon_threadsafe(self._drain)

    def _hang_up(self) -> None:
        """The terminal was closed, which may come as several signals."""
        if not self._is_ending:
            self.handle_exit(signal.SIGHUP, None)

    def _drain(self) -> None:
        logger.info("draining")
        self._app.state.admission.is_draining = True
        asyncio.get_running_loop().call_later(self._lame_duck_seconds, self._stop)

    def _stop(self) -> None:
        self._app.state.admission.bytes.drain()
        self.should_exit = True


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def serve(settings: RouterSettings) -> None:
    """Serve until a signal. Raises ValueError or OSError for settings that cannot be used."""
    handler = logging.StreamHandler(sys.stderr)
    form = "%(asctime)s %(levelname)s %(message)s"
    handler.setFormatter(_JsonLines() if settings.log_format == "json" else logging.Formatter(form))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logger.setLevel(settings.log_level.upper())
    app = application(settings)
    engine = httpx2.URL(settings.engine_url).netloc.decode()  # without a password
    logger.info("encoder %s, engine %s at %s, mode %s", settings.target, settings.engine, engine, mode_of(settings))
    config = configured(
        app,
        settings.stall_seconds,
        settings.drain_seconds,
        lifespan="on",
        h11_max_incomplete_event_size=settings.max_header_bytes,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
    )
    with listening(settings.host, settings.port) as listener:
        _Server(config, app, settings.lame_duck_seconds).run(sockets=[listener])
    logger.info("ended")
