"""What gRPC's descriptions of failed connections mean, and which of them prove nothing."""

import pickle
import socket
import socketserver
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import trustme

from vitwire import Client, DeadlineExceeded, Unavailable, VitwireError
from vitwire._transport.diagnosis import Security, diagnosed, unheard

PLAIN, TLS, MUTUAL = Security(False, False), Security(True, False), Security(True, True)


def failure(address: str, details: str, start: str = "failed to connect to all addresses") -> Unavailable:
    return Unavailable(f"{start}; last error: UNAVAILABLE: ipv4:{address}: {details}", request_id="ab")


@contextmanager
def listening(answer: Callable[[socket.socket], object]) -> Iterator[str]:
    """A server that answers each connection and closes it."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with suppress(OSError):
                answer(self.request)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.mark.parametrize(
    ("details", "meaning"),
    [
        (
            "Failed parsing HTTP/2 (Expected SETTINGS frame as the first frame, got frame type 79)",
            "does not speak gRPC",
        ),
        ("Trying to connect an http1.x server", "does not speak gRPC"),
        (
            "Ssl handshake failed: SSL_ERROR_SSL: error:100000f7:SSL routines::WRONG_VERSION_NUMBER",
            "does not speak TLS",
        ),
        ("Cannot check peer: missing selected ALPN property.", "speaks TLS but not gRPC"),
        (
            "SSL routines::CERTIFICATE_VERIFY_FAILED: certificate has expired: OK",
            r"not trusted \(certificate has expired\)",
        ),
        ("SSL routines::CERTIFICATE_VERIFY_FAILED", r"not trusted \(its CA is unknown\)"),
        ("Hostname Verification Check failed.", "does not cover"),
        ("Peer name localhost is not in peer certificate", "does not cover"),
    ],
)
@pytest.mark.parametrize("start", ["failed to connect to all addresses", "connections to all backends failing"])
def test_descriptions_become_sentences(start: str, details: str, meaning: str) -> None:
    error = diagnosed(failure("10.0.0.1:5", details, start), PLAIN)
    assert isinstance(error, Unavailable)
    with pytest.raises(Unavailable, match=f"10.0.0.1:5: the server.* {meaning}"):
        raise pickle.loads(pickle.dumps(error))
    assert error.is_permanent
    assert error.request_id == "ab"
    assert details in error.__notes__[0]


@pytest.mark.parametrize(
    "error",
    [
        failure("127.0.0.1:1", "Failed to connect to remote host: Connection refused"),
        failure("127.0.0.1:1", "Socket closed"),  # nobody answers a probe either
        Unavailable("the server is draining"),
        Unavailable("Socket closed"),  # of a connection that had been made
        DeadlineExceeded("failed to connect to all addresses; WRONG_VERSION_NUMBER"),
    ],
    ids=str,
)
def test_what_may_pass_is_left_as_it_is(error: VitwireError) -> None:
    assert diagnosed(error, PLAIN) is error


def test_a_target_where_nothing_listens_is_named_as_it_was_given() -> None:
    refused = failure("127.0.0.1:1", "Failed to connect to remote host: Connection refused")
    meaning = unheard(refused, "dns:///encoder")
    assert isinstance(meaning, Unavailable)
    assert str(meaning) == "nothing listens at dns:///encoder (connection refused)"
    assert not meaning.is_permanent
    assert unheard(other := failure("127.0.0.1:1", "Socket closed"), "t") is other


def closed(_: socket.socket) -> None:
    """Without a word, as a load balancer does that has no server."""


def served(context: ssl.SSLContext, *, waits: bool) -> Callable[[socket.socket], object]:
    def answer(connection: socket.socket) -> object:
        with context.wrap_socket(connection, server_side=True) as tls:
            return tls.recv(1000) if waits else None

    return answer


def contexts() -> dict[str, Any]:
    authority = trustme.CA()
    context, mutual = (ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER) for _ in range(2))
    for each in (context, mutual):
        authority.issue_cert("127.0.0.1").configure_cert(each)
    authority.configure_trust(mutual)
    mutual.verify_mode = ssl.CERT_REQUIRED
    return {"tls": context, "mutual": mutual}


@pytest.mark.parametrize(
    ("answer", "security", "meaning", "permanent"),
    [
        (closed, PLAIN, "failed to connect", False),
        (closed, TLS, "failed to connect", False),
        ("tls", PLAIN, "speaks TLS: set tls=True", True),
        ("tls", TLS, "failed to connect", False),  # as a load balancer that has no server behind it
        ("mutual", PLAIN, "speaks TLS: set tls=True", True),
        ("mutual", TLS, "accepts only clients with a certificate", True),
        ("mutual", MUTUAL, "accepts only clients with a certificate", False),
    ],
)
def test_a_connection_that_is_closed_is_probed(
    answer: Any, security: Security, meaning: str, *, permanent: bool
) -> None:
    if isinstance(answer, str):
        answer = served(contexts()[answer], waits=answer == "mutual")
    with listening(answer) as address:
        error = diagnosed(failure(address, "Socket closed"), security)
    assert meaning in str(error)
    assert isinstance(error, Unavailable)
    assert error.is_permanent is permanent


def test_a_server_that_is_silent_proves_nothing() -> None:
    ended = threading.Event()
    with listening(lambda _: ended.wait(60)) as address:
        error = failure(address, "Connection reset by peer")
        assert diagnosed(error, PLAIN) is error
        ended.set()


def test_a_load_balancer_without_servers_is_tried_again() -> None:
    with (
        listening(closed) as address,
        Client(address, timeout=60, max_retries=2) as client,
        pytest.raises(Unavailable, match="gave up after 3 attempts"),
    ):
        client.model()
