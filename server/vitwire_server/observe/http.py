"""The metrics port: `/metrics` for Prometheus, `/healthz` for everybody else."""

from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder


class MetricsServer:
    """Serves a registry and a health verdict over HTTP, in daemon threads."""

    def __init__(self, registry: CollectorRegistry, ready: Callable[[], bool], host: str, port: int) -> None:
        """Bind; raises OSError if the address is taken. Port 0 takes a free one."""

        class Page(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                if path == "/metrics":
                    encode, content_type = choose_encoder(self.headers.get("Accept", ""))
                    self._answer(HTTPStatus.OK, content_type, encode(registry))
                elif path == "/healthz":
                    status = HTTPStatus.OK if ready() else HTTPStatus.SERVICE_UNAVAILABLE
                    self._answer(status, "text/plain; charset=utf-8", b"ok\n" if ready() else b"not ready\n")
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

        try:
            self._server = ThreadingHTTPServer((host, port), Page)
        except OSError as error:
            raise OSError(f"cannot listen on {host}:{port}: {error}") from error
        self._server.daemon_threads = True
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
