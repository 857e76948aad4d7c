"""The metrics port: `/metrics` for Prometheus, `/healthz` for everybody else."""

import logging
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import AF_INET, AF_INET6
from threading import Thread

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, choose_encoder

_log = logging.getLogger(__name__)
_TIMEOUT_SECONDS = 10


def _exposition(registry: CollectorRegistry, accept: str) -> tuple[str, bytes]:
    """Content type and body, in the format asked for, or in the plain one if that makes no sense."""
    try:
        encode, content_type = choose_encoder(accept)
        return content_type, encode(registry)
    except (TypeError, ValueError):
        return CONTENT_TYPE_PLAIN_0_0_4, generate_latest(registry)


class MetricsServer:
    """Serves a registry and a health verdict over HTTP, in daemon threads."""

    def __init__(self, registry: CollectorRegistry, ready: Callable[[], bool], host: str, port: int) -> None:
        """Bind; raises OSError if the address is taken. Port 0 takes a free one."""

        class Page(BaseHTTPRequestHandler):
            timeout = _TIMEOUT_SECONDS

            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                if path == "/metrics":
                    self._answer(HTTPStatus.OK, *_exposition(registry, self.headers.get("Accept", "")))
                elif path == "/healthz":
                    is_ready = ready()
                    status = HTTPStatus.OK if is_ready else HTTPStatus.SERVICE_UNAVAILABLE
                    self._answer(status, "text/plain; charset=utf-8", b"ok\n" if is_ready else b"not ready\n")
                else:
                    self._answer(HTTPStatus.NOT_FOUND, "text/plain; charset=utf-8", b"/metrics or /healthz\n")

            def _answer(self, status: HTTPStatus, content_type: str, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's signature
                """Scrapes are not worth a log line."""

        class Server(ThreadingHTTPServer):
            address_family = AF_INET6 if ":" in host else AF_INET
            daemon_threads = True

            def handle_error(self, request: object, client_address: object) -> None:  # noqa: ARG002 - the base class calls it so
                """A scraper that went away is not worth a traceback."""
                _log.debug("metrics port: %s", client_address, exc_info=True)

        try:
            self._server = Server((host, port), Page)
        except OSError as error:
            raise OSError(f"cannot listen on {host}:{port}: {error}") from error
        self._thread = Thread(target=self._server.serve_forever, name="metrics", daemon=True)

    @property
    def port(self) -> int:
        """The port that was bound."""
        return int(self._server.server_address[1])

    def start(self) -> None:
        """Answer from now on."""
        self._thread.start()

    def stop(self) -> None:
        """Close the port."""
        self._server.shutdown()
        self._server.server_close()
