"""Addresses that somebody listens on already, which gRPC would share or take over without a word."""

import errno
import socket
from collections.abc import Iterable
from pathlib import Path


def raise_if_port_taken(host: str, port: int) -> None:
    """Raises OSError if one of the addresses that a name stands for is taken: gRPC is content with the others."""
    name = host.strip("[]")
    for family, kind, protocol, _, address in socket.getaddrinfo(name, port, type=socket.SOCK_STREAM):
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(address)
                probe.listen()
            except OSError as error:
                if error.errno == errno.EADDRINUSE:  # an address that this machine has not is left to gRPC
                    raise


def raise_if_ports_taken(host: str, flag: str, ports: Iterable[int]) -> None:
    """Raises OSError over the first port that another program listens on; the message names the flag."""
    for port in ports:
        try:
            raise_if_port_taken(host, port)
        except OSError as error:
            raise OSError(f"{flag}: cannot listen on {host}:{port}: {error}") from error


def raise_if_socket_taken(path: Path) -> None:
    """Raises OSError if a server answers at a Unix socket: gRPC would replace it, and what nobody serves it may."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return
    raise OSError(errno.EADDRINUSE, "a server listens there")
