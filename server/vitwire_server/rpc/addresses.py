"""Checks for addresses in use, which gRPC would share or take over silently."""

import errno
import socket
from collections.abc import Iterable
from pathlib import Path


def raise_if_port_taken(host: str, port: int) -> None:
    """Raises OSError if any address of the host is taken; gRPC would listen on the others only."""
    name = host.strip("[]")
    for family, kind, protocol, _, address in socket.getaddrinfo(name, port, type=socket.SOCK_STREAM):
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(address)
                probe.listen()
            except OSError as error:
                if error.errno == errno.EADDRINUSE:  # other errors are left to gRPC
                    raise


def raise_if_ports_taken(host: str, flag: str, ports: Iterable[int]) -> None:
    """Raises OSError for the first port that another program listens on; the message names the flag."""
    for port in ports:
        try:
            raise_if_port_taken(host, port)
        except OSError as error:
            raise OSError(f"{flag}: cannot listen on {host}:{port}: {error}") from error


def raise_if_socket_taken(path: Path) -> None:
    """Raises OSError if a server answers at a Unix socket; gRPC may replace only a stale one."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return
    raise OSError(errno.EADDRINUSE, "another server listens there")
