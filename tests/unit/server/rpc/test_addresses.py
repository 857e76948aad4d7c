"""A port that several processes of one server share."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress

import grpc
import pytest

from vitwire_server.rpc.addresses import PortReservation, raise_if_port_taken

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="semantics of Linux")
HOSTS = {
    "127.0.0.1": [(socket.AF_INET, "127.0.0.1")],
    "::1": [(socket.AF_INET6, "::1")],
    "[::1]": [(socket.AF_INET6, "::1")],
    "localhost": [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")],
    "0.0.0.0": [(socket.AF_INET, "0.0.0.0"), (socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::")],
    "::": [(socket.AF_INET6, "::"), (socket.AF_INET6, "::1"), (socket.AF_INET, "0.0.0.0")],
}
"""Addresses that a reservation of each host covers."""
EDGE = """
import grpc, sys
from concurrent.futures import ThreadPoolExecutor
server = grpc.server(ThreadPoolExecutor(1), options=[("grpc.so_reuseport", 1)])
print(server.add_insecure_port(sys.argv[1]), flush=True)
server.start()
sys.stdin.read()
"""


def has(family: int, address: str) -> bool:
    with suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((address, 0))
        return True
    return False


def covered(host: str) -> list[tuple[int, str]]:
    """The addresses of `host` that this machine has."""
    names = {each[4][0] for each in socket.getaddrinfo(host.strip("[]"), 1, type=socket.SOCK_STREAM)}
    wanted = [pair for pair in HOSTS[host] if host != "localhost" or pair[1] in names]
    return [(family, address) for family, address in wanted if has(family, address)]


@contextmanager
def listening(family: int, address: str, port: int, *, reuse: int = 0, share: int = 0) -> Iterator[socket.socket]:
    with socket.socket(family, socket.SOCK_STREAM) as made:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, share)
        made.bind((address, port))
        made.listen()
        yield made


@pytest.fixture(params=HOSTS)
def host(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if not covered(name):
        pytest.skip(f"this machine has no address of {name}")
    return name


def test_only_sockets_that_share_may_listen_and_nothing_listens_by_itself(host: str) -> None:
    with closing(PortReservation(host, 0)) as reservation:
        port = reservation.port
        for family, address in covered(host):
            for reuse in (0, 1):
                with pytest.raises(OSError, match="in use"), listening(family, address, port, reuse=reuse):
                    pass
        family, address = covered(host)[0]
        loopback = "127.0.0.1" if family == socket.AF_INET else "::1"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((loopback, port), 10)
        for _ in range(2):  # the port stays reserved when all edges are gone
            with listening(family, address, port, reuse=1, share=1) as one:
                with (
                    listening(family, address, port, reuse=1, share=1) as two,
                    pytest.raises(OSError, match="in use"),
                    listening(family, address, port, reuse=1),
                ):
                    pass
                two.close()
                with socket.create_connection((loopback, port), 10):
                    one.settimeout(10)
                    one.accept()[0].close()
            with pytest.raises(OSError, match="in use"), listening(family, address, port, reuse=1):
                pass
    with listening(family, address, port, reuse=1):
        pass


def test_a_taken_port_is_refused(host: str) -> None:
    for family, address in covered(host) if host != "0.0.0.0" else covered(host)[:2]:
        for share in (0, 1):
            with listening(family, address, 0, reuse=1, share=share) as foreign:
                port = foreign.getsockname()[1]
                with pytest.raises(
                    OSError, match=rf"^cannot listen on .*:{port}: \[Errno 98\] Address already in use$"
                ):
                    PortReservation(host, port)


def test_a_second_server_is_refused_with_and_without_edges(host: str) -> None:
    with closing(PortReservation(host, 0)) as reservation, ExitStack() as edges:
        for _ in range(2):
            with pytest.raises(OSError, match="cannot listen on"):
                PortReservation(host, reservation.port)
            with pytest.raises(OSError, match="in use"):
                raise_if_port_taken(host, reservation.port)
            edges.enter_context(listening(*covered(host)[0], reservation.port, reuse=1, share=1))


def test_connections_of_an_earlier_server_do_not_keep_the_port() -> None:
    with listening(socket.AF_INET, "127.0.0.1", 0, reuse=1) as earlier:
        port = earlier.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port), 10)
        earlier.accept()[0].close()  # closed first: this end lingers in TIME_WAIT
        client.close()
    PortReservation("127.0.0.1", port).close()


def test_two_at_once_never_share() -> None:
    def reserve(port: int) -> PortReservation | None:
        try:
            return PortReservation("127.0.0.1", port)
        except OSError:
            return None

    with ThreadPoolExecutor(8) as pool:
        for _ in range(50):
            with closing(PortReservation("127.0.0.1", 0)) as free:
                port = free.port
            made = [each for each in pool.map(reserve, [port] * 8) if each]
            assert len(made) <= 1
            for each in made:
                each.close()


def test_grpc_servers_of_two_processes_share_the_port(host: str) -> None:
    with closing(PortReservation(host, 0)) as reservation:
        target = f"[{host}]:{reservation.port}" if host.startswith(":") else f"{host}:{reservation.port}"
        edges = [
            subprocess.Popen([sys.executable, "-c", EDGE, target], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            for _ in range(2)
        ]
        try:
            for edge in edges:
                assert edge.stdout
                assert edge.stdout.readline() == b"%d\n" % reservation.port
            alone = grpc.server(ThreadPoolExecutor(1), options=[("grpc.so_reuseport", 0)])
            with pytest.raises(RuntimeError):
                alone.add_insecure_port(target)
        finally:
            for edge in edges:
                edge.communicate(timeout=60)


def test_an_unknown_host_is_named() -> None:
    with pytest.raises(OSError, match=r"^cannot listen on nowhere\.invalid:1: "):
        PortReservation("nowhere.invalid", 1)
    with pytest.raises(OSError, match=r"^cannot listen on 203\.0\.113\.1:0: .*assign requested address"):
        PortReservation("203.0.113.1", 0)
    with pytest.raises(OSError, match="not an address of this machine"):
        raise_if_port_taken("203.0.113.1", 0)
    with pytest.raises(OSError, match="not known"):
        raise_if_port_taken("nowhere.invalid", 0)
    raise_if_port_taken("127.0.0.1", 0)
