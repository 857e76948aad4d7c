"""Addresses in use, which gRPC would share or take over silently, and a port for several processes of one server."""

import errno
import os
import socket
import sys
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from pathlib import Path

_MOST_SOCKET_BYTES = 107 if sys.platform == "linux" else 103
"""Room in a `sockaddr_un`, without the zero byte at its end."""
_ATTEMPTS = 20
"""Free ports to try until one is free at every address of the host."""


def raise_if_port_taken(host: str, port: int) -> None:
    """Raises OSError if an address of the host is taken, or not this machine's; gRPC would listen on the others."""
    try:
        _reserved(host.strip("[]"), port).close()
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            raise OSError(error.errno, "it is not an address of this machine; 0.0.0.0 stands for all") from error
        if error.errno in (errno.EADDRINUSE, errno.EACCES) or isinstance(error, socket.gaierror):
            raise  # others are left to gRPC


def raise_if_ports_taken(host: str, flag: str, ports: Iterable[int]) -> None:
    """Raises OSError for the first port that another program listens on; the message names the flag."""
    for port in ports:
        try:
            raise_if_port_taken(host, port)
        except OSError as error:
            raise OSError(f"{flag}: cannot listen on {host}:{port}: {error.strerror}") from error


def raise_if_socket_unusable(path: Path) -> None:
    """Raises OSError if no server can listen at this path; gRPC may replace a socket that nobody listens on."""
    if len(os.fsencode(path)) > _MOST_SOCKET_BYTES:
        raise OSError(errno.ENAMETOOLONG, f"the path has more than {_MOST_SOCKET_BYTES} bytes")
    if not path.parent.is_dir():
        raise OSError(errno.ENOENT, "there is no such directory")
    if not path.exists():
        return
    if not path.is_socket():
        raise OSError(errno.EEXIST, "a file that is not a socket is there")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except BlockingIOError:  # the queue of a server that hangs is full
            pass
        except OSError:
            return
    raise OSError(errno.EADDRINUSE, "another server listens there")


class PortReservation:
    """A port that processes of this user may share, on Linux: each listens with SO_REUSEPORT while this one holds it.

    Every address of the host is bound exclusively first, so a port that another program or another server listens on is
    refused. Then only sockets with SO_REUSEPORT may bind it, whether or not any process is listening at the time.
    """

    def __init__(self, host: str, port: int) -> None:
        """Reserve the port; 0 picks one that is free at every address of the host. Raises OSError if it is taken."""
        name = host.strip("[]")
        for left in reversed(range(1 if port else _ATTEMPTS)):
            try:
                self.port = port or _free_port(name)
                self._sockets = _reserved(name, self.port)
                break
            except OSError as error:
                if not left or error.errno != errno.EADDRINUSE:
                    raise OSError(f"cannot listen on {host}:{port}: {error}") from error

    def close(self) -> None:
        """Give the port up; processes that listen keep it."""
        self._sockets.close()


def _reserved(name: str, port: int) -> ExitStack:
    """Sockets at all addresses. Raises OSError if an address is taken or none can be bound."""
    count, unusable = 0, None
    with ExitStack() as reserved:
        for family, _, _, _, address in socket.getaddrinfo(name, port, type=socket.SOCK_STREAM):
            try:
                reserved.enter_context(_shared_socket(family, address))
                count += 1
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    raise
                unusable = error  # as with `localhost` if IPv6 is off; gRPC leaves it out too
        if name == "0.0.0.0":  # noqa: S104 - compared with; gRPC listens on every IPv6 address too if it can
            with suppress(OSError):
                reserved.enter_context(_shared_socket(socket.AF_INET6, ("::", port), only_v6=True))
        if unusable and not count:
            raise unusable
        return reserved.pop_all()


def _free_port(name: str) -> int:
    """A port that is free at the first usable address."""
    unusable = OSError(errno.EADDRNOTAVAIL, "the host has no address")
    for family, _, _, _, address in socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.bind(address)
                return int(probe.getsockname()[1])
        except OSError as error:
            unusable = error
    raise unusable


def _shared_socket(family: int, address: tuple[object, ...], *, only_v6: bool = False) -> socket.socket:
    """A socket that does not listen, bound so that only sockets with SO_REUSEPORT may bind it as well."""
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        if only_v6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of an earlier server may linger
        bound.bind(address)
        bound.listen()  # fails if there is any other socket that is bound here
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        bound.shutdown(socket.SHUT_RDWR)  # ends listening; Linux keeps a port that was bound by number
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    except OSError:
        bound.close()
        raise
    return bound
