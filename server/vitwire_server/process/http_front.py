"""`--http-port`: a child process answers embeddings over HTTP, which is `vitwire router` without an engine."""

import asyncio
import logging
import secrets
import signal
import socket
from dataclasses import replace
from pathlib import Path

from vitwire_children import spawn
from vitwire_server.config.settings import ServeSettings, UsageError
from vitwire_server.process.children import ChildProcess, Launch, StartFailed
from vitwire_server.rpc.server import is_loopback

_log = logging.getLogger(__name__)
_STOP_SECONDS = 5.0


def reachable(settings: ServeSettings, folder: Path) -> ServeSettings:
    """The settings of a server that its front end reaches: without TLS, and with a token if tokens are required."""
    token = secrets.token_urlsafe() if settings.auth_tokens_file else ""
    return replace(settings, unix_socket=settings.unix_socket or folder / "grpc", http_token=token)


class HttpFront:
    """The front end, over all its restarts. The port stays open meanwhile: connections wait."""

    def __init__(self, settings: ServeSettings) -> None:
        """`settings` as `reachable` returned them. Raises OSError if the port cannot be used."""
        self._settings = settings
        self._stopping = asyncio.Event()
        host, port = settings.http_host.strip("[]"), settings.http_port or 0
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=2048)
        self.port = int(self._listener.getsockname()[1])
        if not is_loopback(host):
            who = "" if settings.auth_tokens_file else ", and serves anyone who can reach it: see --auth-tokens-file"
            _log.warning("--http-host %s: HTTP has no TLS%s", host, who)
        self._child = ChildProcess("http", self._launch, settings, is_ready_by_heartbeat=True)
        self._running = asyncio.create_task(self._child.keep_running(self._stopping))

    async def started(self, stopping: asyncio.Event) -> None:
        """Wait until it answers, or `stopping` is set. Raises UsageError if it cannot be started."""
        others = [asyncio.create_task(each.wait()) for each in (self._child.was_ready, stopping)]
        await asyncio.wait([self._running, *others], return_when=asyncio.FIRST_COMPLETED)
        for each in others:
            each.cancel()
        if self._running.done() and (error := self._running.exception()):
            raise UsageError(str(error)) from error

    async def watch(self) -> None:
        """Wait until the process cannot be kept running."""
        try:
            await asyncio.shield(self._running)
        except (StartFailed, OSError) as error:
            _log.error("%s", error)

    async def stop(self, seconds: float) -> None:
        """Take no more requests; those in flight have `seconds`. A second call does nothing."""
        self._listener.close()
        self._stopping.set()
        self._child.send(signal.SIGTERM)
        await asyncio.wait([self._running], timeout=seconds + _STOP_SECONDS)
        self._running.cancel()  # which kills the process
        await asyncio.gather(self._running, return_exceptions=True)

    def _launch(self) -> Launch:
        settings, listener = self._settings, self._listener.fileno()
        flags = {
            "--target": f"unix:{settings.unix_socket}",
            "--max-image-pixels": settings.max_image_pixels,
            "--drain-seconds": settings.drain_seconds / 2,
            "--api-keys-file": settings.auth_tokens_file,
            "--log-format": settings.log_format,
            "--log-level": settings.log_level,
        }
        words = [word for flag, value in flags.items() if value is not None for word in (flag, value)]
        command = spawn.program("vitwire_cli", "router", "--no-engine", "--no-tls", *words)
        return Launch(command, {"VITWIRE_ROUTER_TOKEN": settings.http_token, spawn.LISTENER: str(listener)}, [listener])
