"""What strangers can do to the ports: fill them with connections, and send what inflates."""

import http.client
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import psutil
import pytest
from prometheus_client import CollectorRegistry

from checkpoints import Checkpoints
from servers import PIXELS_ONLY, ServerProcess, serving
from vitwire_server.core.health import Health
from vitwire_server.observe import http as pages
from waiting import until

DESCRIPTORS, CONNECTIONS = 1024, 256
"""What the server may open, and how many of these its metrics port may take."""
CHECK, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
ENCODE, ENCODE_STREAM = "/vitwire.v1.EncoderService/Encode", "/vitwire.v1.EncoderService/EncodeStream"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
INFLATED = 64 << 20


@pytest.fixture(scope="module")
def server(checkpoints: Checkpoints, unix_socket: Path) -> Iterator[ServerProcess]:
    """With as many descriptors as a shell gives, and no way to more."""
    limited = (
        f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({DESCRIPTORS}, {DESCRIPTORS}))\n"
        "from vitwire_server.__main__ import main; main()"
    )
    flags = ("--unix-socket", str(unix_socket))
    with serving(checkpoints("qwen2_vl"), *PIXELS_ONLY, *flags, program=("-c", limited)) as process:
        yield process


def health(target: str) -> bytes:
    with grpc.insecure_channel(target, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        answer: bytes = channel.unary_unary(CHECK)(b"", timeout=20)
        return answer


@contextmanager
def idle_connections(port: int, count: int, sent: bytes = b"") -> Iterator[None]:
    with ExitStack() as stack:
        for _ in range(count):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20))
            connection.sendall(sent)
        yield


def test_a_crowd_on_the_metrics_port_locks_out_no_probe(server: ServerProcess) -> None:
    process = psutil.Process(server.process.pid)
    before, threads = process.num_fds(), process.num_threads()
    with idle_connections(server.metrics_port, 3 * DESCRIPTORS, b"GET /livez HTTP/1.1\r\nX-Slow: "):
        assert server.page("/livez") == (200, "ok\n")
        assert server.page("/healthz")[0] == 200
        assert health(server.target) == b"\x08\x01"
        assert process.num_fds() <= before + CONNECTIONS + 40
        assert process.num_threads() <= threads + 2
        spent = sum(process.cpu_times()[:2])
        time.sleep(1)
        assert sum(process.cpu_times()[:2]) - spent < 0.5, "idle connections cost no processor time"
    until(lambda: process.num_fds() <= before + 4)  # of gRPC's own connections, some may stay for a moment


@pytest.mark.parametrize("first", ["the probe", "the crowd"])
def test_a_probe_amid_a_crowd_is_answered(server: ServerProcess, first: str) -> None:
    """All of them wait for the server when it looks, the probe with its request."""
    process = psutil.Process(server.process.pid)
    crowd, port = idle_connections(server.metrics_port, DESCRIPTORS), server.metrics_port
    with ExitStack() as stack:
        process.suspend()
        stack.callback(process.resume)
        if first == "the crowd":
            stack.enter_context(crowd)
        probe = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20))
        probe.sendall(b"GET /livez HTTP/1.1\r\n\r\n")
        if first == "the probe":
            stack.enter_context(crowd)
        process.resume()
        assert probe.makefile("rb").read().endswith(b"ok\n")


def test_a_crowd_on_the_grpc_port_leaves_the_metrics_port_and_the_socket_alone(
    server: ServerProcess, unix_socket: Path
) -> None:
    process = psutil.Process(server.process.pid)
    before = process.num_fds()
    with idle_connections(server.port, 3 * DESCRIPTORS):
        assert server.page("/livez") == (200, "ok\n")
        assert health(f"unix:{unix_socket}") == b"\x08\x01"
        assert process.num_fds() < DESCRIPTORS - CONNECTIONS
    until(lambda: process.num_fds() <= before + 4)  # of gRPC's own connections, some may stay for a moment
    assert health(server.target) == b"\x08\x01"


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /livez HTTP/1.1\r\n\r\n", b"HTTP/1.0 200 "),
        (b"GET /livez?x HTTP/1.0\n\n", b"HTTP/1.0 200 "),
        (b"GET /nowhere HTTP/1.1\r\n\r\n", b"HTTP/1.0 404 "),
        (b"POST /metrics HTTP/1.1\r\n\r\n" + b"x" * 20_000, b"HTTP/1.0 405 "),
        (b"nonsense\r\n\r\n", b"<!DOCTYPE HTML>"),
        (b"GET /livez HTTP/1.1\r\nX: " + b"x" * 20_000, b"HTTP/1.0 431 "),
        (b"GET /livez HTTP/1.1\r\n" + b"X: y\r\n" * 200 + b"\r\n", b"HTTP/1.0 431 "),
    ],
)
def test_requests_as_strangers_write_them(server: ServerProcess, request_: bytes, status: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.metrics_port), timeout=20) as connection:
        connection.sendall(request_)
        answer = connection.makefile("rb").read()
    assert answer.startswith(status), answer


def test_a_request_may_come_in_pieces(server: ServerProcess) -> None:
    with socket.create_connection(("127.0.0.1", server.metrics_port), timeout=20) as connection:
        for byte in b"HEAD /metrics HTTP/1.1\r\nHost: x\r\n\r\n":
            connection.sendall(bytes([byte]))
        answer = http.client.HTTPResponse(connection, method="HEAD")
        answer.begin()
        assert answer.status == 200
        assert int(answer.headers["Content-Length"]) > 1000


def trickle(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        while True:
            connection.sendall(b"G")
            time.sleep(0.01)


def test_a_connection_has_an_end_whatever_trickles_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_SECONDS", 0.2)
    server = pages.MetricsServer(CollectorRegistry(), Health(), "127.0.0.1", 0, 8)
    server.start()
    with pytest.raises((ConnectionResetError, BrokenPipeError)):
        trickle(server.port)
    server.stop()
    with pytest.raises(ConnectionRefusedError):
        trickle(server.port)


@pytest.mark.parametrize("algorithm", [grpc.Compression.Gzip, grpc.Compression.Deflate])
@pytest.mark.parametrize("method", [CHECK, WATCH, ENCODE, ENCODE_STREAM, REFLECTION])
def test_compressed_messages_are_refused_before_they_are_inflated(
    server: ServerProcess, unix_socket: Path, method: str, algorithm: grpc.Compression
) -> None:
    process = psutil.Process(server.process.pid)
    before = process.memory_info().rss
    unlimited = [("grpc.max_send_message_length", -1)]
    for target in (server.target, f"unix:{unix_socket}"):
        with grpc.insecure_channel(target, unlimited) as channel, pytest.raises(grpc.RpcError) as refused:
            list(channel.unary_stream(method)(bytes(INFLATED), compression=algorithm, timeout=60))
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert "is disabled" in refused.value.details()
    assert process.memory_info().rss < before + INFLATED // 4
    assert health(server.target) == b"\x08\x01"
    assert "is disabled" not in server.log(), "a line of gRPC's core for each message, as text and without bound"
