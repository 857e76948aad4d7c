"""The metrics port: `/metrics` for Prometheus, `/healthz` and `/livez` for probes, `/` for people."""

import logging
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import AF_INET, AF_INET6
from threading import Thread
from typing import NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, choose_encoder

from vitwire_server.core.health import Health
from vitwire_server.observe.page import page, policy
from vitwire_server.observe.readings import History, Readings

_log = logging.getLogger(__name__)
_TIMEOUT_SECONDS = 10
_TEXT = "text/plain; charset=utf-8"


class Answer(NamedTuple):
    """What a path answers."""

    status: HTTPStatus
    content_type: str
    body: bytes


Routes = Mapping[str, Callable[[str], Answer]]
"""By path; they are given the Accept header."""


def _routes(registry: CollectorRegistry, history: History, health: Health) -> Routes:
    return {
        "/": lambda _: _document(page(Readings(registry), history.points, health)),
        "/metrics": lambda accept: Answer(HTTPStatus.OK, *_exposition(registry, accept)),
        "/healthz": lambda _: _verdict(health.is_ready, "not ready"),
        "/livez": lambda _: _verdict(health.is_alive, "not alive"),
    }


def _document(text: str) -> Answer:
    return Answer(HTTPStatus.OK, "text/html; charset=utf-8", text.encode())


def _verdict(is_well: bool, otherwise: str) -> Answer:
    status = HTTPStatus.OK if is_well else HTTPStatus.SERVICE_UNAVAILABLE
    return Answer(status, _TEXT, b"ok\n" if is_well else f"{otherwise}\n".encode())


def _exposition(registry: CollectorRegistry, accept: str) -> tuple[str, bytes]:
    """Content type and body, in the format asked for, or in the plain one if that makes no sense."""
    try:
        encode, content_type = choose_encoder(accept)
        return content_type, encode(registry)
    except (TypeError, ValueError):
        return CONTENT_TYPE_PLAIN_0_0_4, generate_latest(registry)


class MetricsServer:
    """Serves a registry and a server's health over HTTP, in daemon threads."""

    def __init__(self, registry: CollectorRegistry, health: Health, host: str, port: int) -> None:
        """Bind; raises OSError if the address is taken. Port 0 takes a free one."""
        self._history = History(registry)
        routes = _routes(registry, self._history, health)

        class Pages(BaseHTTPRequestHandler):
            timeout = _TIMEOUT_SECONDS

            def do_GET(self) -> None:
                route = routes.get(self.path.partition("?")[0])
                if route:
                    self._answer(route(self.headers.get("Accept", "")))
                else:
                    self._answer(Answer(HTTPStatus.NOT_FOUND, _TEXT, f"{', '.join(routes)}\n".encode()))

            def do_HEAD(self) -> None:
                self.do_GET()

            def _answer(self, answer: Answer) -> None:
                self.send_response(answer.status)
                self.send_header("Content-Type", answer.content_type)
                self.send_header("Content-Length", str(len(answer.body)))
                self.send_header("Content-Security-Policy", policy())
                self.send_header("X-Content-Type-Options", "nosniff")
                self.send_header("Cache-Control", "no-store")
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(answer.body)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's signature
                """Scrapes are not worth a log line."""

        class Server(ThreadingHTTPServer):
            address_family = AF_INET6 if ":" in host else AF_INET
            daemon_threads = True
            request_queue_size = 128

            def handle_error(self, request: object, client_address: object) -> None:  # noqa: ARG002 - the base class calls it so
                """A scraper that went away is not worth a traceback."""
                _log.debug("metrics port: %s", client_address, exc_info=True)

        try:
            self._server = Server((host, port), Pages)
        except OSError as error:
            raise OSError(f"cannot listen on {host}:{port}: {error}") from error
        self._thread = Thread(target=self._server.serve_forever, name="metrics", daemon=True)

    @property
    def port(self) -> int:
        """The port that was bound."""
        return int(self._server.server_address[1])

    def start(self) -> None:
        """Answer from now on."""
        self._history.start()
        self._thread.start()

    def stop(self) -> None:
        """Close the port."""
        self._history.stop()
        self._server.shutdown()
        self._server.server_close()
