"""A name server on loopback whose answer changes: every name has the same A records."""

import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Thread

_HEADER = struct.Struct("!6H")
_A, _IN = 1, 1
_ANSWER, _POINTER = 0x8580, 0xC00C
"""Flags of an authoritative response without error; a pointer to the question's name."""


@dataclass
class NameServer:
    """What a running name server answers."""

    port: int
    addresses: Sequence[str]
    asked: int = field(default=0)
    """Queries for addresses so far."""

    def target(self, port: int) -> str:
        """For a gRPC channel that asks this name server."""
        return f"dns://127.0.0.1:{self.port}/vitwire.test:{port}"


@contextmanager
def answering(*addresses: str) -> Iterator[NameServer]:
    """A name server over UDP; assign `addresses` to change its answer."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("127.0.0.1", 0))
        server = NameServer(sock.getsockname()[1], addresses)
        thread = Thread(target=_serve, args=(sock, server), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            sock.sendto(b"", sock.getsockname())
            thread.join()


def _serve(sock: socket.socket, server: NameServer) -> None:
    while True:
        query, peer = sock.recvfrom(4096)
        if not query:
            return
        sock.sendto(_response(query, server), peer)


def _response(query: bytes, server: NameServer) -> bytes:
    """The answer to one question: A records with no lifetime; for every other type, none."""
    number = _HEADER.unpack_from(query)[0]
    end = query.index(0, _HEADER.size) + 5
    kind = struct.unpack_from("!H", query, end - 4)[0]
    addresses = server.addresses if kind == _A else ()
    server.asked += kind == _A
    records = [struct.pack("!3HIH", _POINTER, _A, _IN, 0, 4) + socket.inet_aton(each) for each in addresses]
    header = _HEADER.pack(number, _ANSWER, 1, len(records), 0, 0)
    return header + query[_HEADER.size : end] + b"".join(records)
