"""HTTP/2 by hand: frames that no library sends, and a proxy that resets streams."""

import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from struct import pack

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, CONTINUATION = 0, 1, 3, 4, 6, 7, 9
END_STREAM, END_HEADERS = 1, 4
CANCEL, ENHANCE_YOUR_CALM = 8, 11
Frame = tuple[int, int, int, bytes]
"""Type, flags, stream and payload."""
ENCODE = "/vitwire.v1.EncoderService/Encode"
_FRAME = 16_000
_LONG = 1000
"""Bytes of a DATA frame that only uploads have."""


def framed(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return pack(">I", len(payload))[1:] + pack(">BBI", kind, flags, stream) + payload


def header(name: str, value: str) -> bytes:
    """A header as HPACK has it without Huffman codes and without its table."""
    return b"\x10" + _text(name) + _text(value)


def call_headers(path: str) -> bytes:
    """The header block of a gRPC call."""
    names = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "test", "te": "trailers"}
    return b"".join(header(*each) for each in ({**names, "content-type": "application/grpc"}).items())


def _text(text: str) -> bytes:
    raw, length = text.encode(), bytearray()
    rest = len(raw) - 127
    if rest < 0:
        return bytes([len(raw)]) + raw
    while rest >= 128:
        length.append(rest % 128 | 128)
        rest //= 128
    return b"\x7f" + bytes(length) + bytes([rest]) + raw


def connected(target: str, seconds: float = 30) -> socket.socket:
    """A connection that has sent the preface and empty settings."""
    host, _, port = target.rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=seconds)
    connection.sendall(PREFACE + framed(SETTINGS, 0, 0))
    return connection


def frames(connection: socket.socket) -> Iterator[Frame]:
    """Frames as they arrive, until the connection ends or times out."""
    with suppress(OSError), connection.makefile("rb") as incoming:
        while len(head := incoming.read(9)) == 9:
            payload = incoming.read(int.from_bytes(head[:3]))
            yield head[3], head[4], int.from_bytes(head[5:]), payload


def flood(target: str, calls: int, path: str = ENCODE, at_a_time: int = 100) -> None:
    """Start calls and reset them at once, until the server closes the connection if it does."""
    with connected(target) as connection, suppress(OSError):
        _start(lambda: deque(frames(connection), maxlen=0))
        for first in range(1, 2 * calls, 2 * at_a_time):
            pairs = (
                framed(HEADERS, END_HEADERS | END_STREAM, stream, call_headers(path))
                + framed(RST_STREAM, 0, stream, pack(">I", CANCEL))
                for stream in range(first, first + 2 * at_a_time, 2)
            )
            connection.sendall(b"".join(pairs))


def long_headers(target: str, size: int, path: str = ENCODE) -> list[Frame]:
    """Send the headers of a call in a block of this size; returns the frames that came until the connection ended."""
    block = call_headers(path) + header("x-long", "v" * 50) * (size // 60)
    parts = [block[at : at + _FRAME] for at in range(0, len(block), _FRAME)]
    with connected(target) as connection:
        with suppress(OSError):
            connection.sendall(framed(HEADERS, END_STREAM, 1, parts[0]))
            for part in parts[1:]:
                connection.sendall(framed(CONTINUATION, 0, 1, part))
            connection.sendall(framed(CONTINUATION, END_HEADERS, 1))
        return list(frames(connection))


class Resetting:
    """A proxy that answers the next `resets` uploads with RST_STREAM of this code, and passes on everything else."""

    def __init__(self, target: str, code: int) -> None:
        self.resets = 0
        self._target, self._code = target, code
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.target = f"127.0.0.1:{self._listener.getsockname()[1]}"
        _start(self._accept)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        host, _, port = self._target.rpartition(":")
        with suppress(OSError):
            while True:
                client = self._listener.accept()[0]
                server, lock = socket.create_connection((host, int(port))), threading.Lock()
                _start(partial(self._upwards, client, server, lock))
                _start(partial(_downwards, server, client, lock))

    def _upwards(self, client: socket.socket, server: socket.socket, lock: threading.Lock) -> None:
        with suppress(OSError), server:
            server.sendall(client.recv(len(PREFACE), socket.MSG_WAITALL))
            for kind, flags, stream, payload in frames(client):
                if kind == DATA and len(payload) > _LONG and self.resets > 0:
                    self.resets -= 1
                    with lock:
                        client.sendall(framed(RST_STREAM, 0, stream, pack(">I", self._code)))
                    server.sendall(framed(RST_STREAM, 0, stream, pack(">I", CANCEL)))
                else:
                    server.sendall(framed(kind, flags, stream, payload))
            server.shutdown(socket.SHUT_RDWR)


def _downwards(server: socket.socket, client: socket.socket, lock: threading.Lock) -> None:
    with suppress(OSError), client:
        for kind, flags, stream, payload in frames(server):
            with lock:
                client.sendall(framed(kind, flags, stream, payload))
        client.shutdown(socket.SHUT_RDWR)


def _start(work: Callable[[], object]) -> None:
    threading.Thread(target=work, daemon=True).start()


@contextmanager
def resetting(target: str, code: int) -> Iterator[Resetting]:
    """The proxy in front of a server."""
    proxy = Resetting(target, code)
    try:
        yield proxy
    finally:
        proxy.close()
