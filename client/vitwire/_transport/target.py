"""Checks of a client's target. gRPC reports invalid targets late, and some never."""

import os
from ipaddress import IPv4Address, IPv6Address

VARIABLE = "VITWIRE_TARGET"
_MAX_PORT = 65535
_FORMS = "expected host:port, dns:///name:port, ipv4:address:port,address:port or unix:path"


def checked_target(target: str | None) -> str:
    """The target, by default that of the environment. Raises ValueError if it is missing or invalid."""
    if target is None:
        target = os.environ.get(VARIABLE, "")
        if not target:
            raise ValueError(f"no target: pass one, such as 'localhost:50051', or set {VARIABLE}")
    scheme, _, rest = target.partition(":")
    if scheme in ("http", "https"):
        raise ValueError(f"target {target!r} is a URL; {_FORMS}")
    if scheme in ("ipv4", "ipv6"):
        for address in rest.split(","):
            _check_address(target, scheme, address)
    elif scheme == "dns":
        _check_name(target, rest.rpartition("/")[2] if rest.startswith("//") else rest)
    elif rest.count(":") == 0 and not rest.startswith("/") and scheme not in ("unix", "unix-abstract", "xds"):
        _check_name(target, target)
    return target


def _check_address(target: str, scheme: str, address: str) -> None:
    host, colon, port = address.rpartition(":")
    try:
        if scheme == "ipv4":
            IPv4Address(host)
        else:
            IPv6Address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        wrong = f"{host!r} is not an {scheme} address; for a name use dns:///name:port"
        raise ValueError(f"target {target!r}: {wrong if colon else f'{address!r} has no port'}") from None
    _check_port(target, port)


def _check_name(target: str, address: str) -> None:
    host, colon, port = address.rpartition(":")
    if not (host or not colon) or not address:
        raise ValueError(f"target {target!r} has no host; {_FORMS}")
    if colon and not host.startswith("[") and ":" not in host:
        _check_port(target, port)


def _check_port(target: str, port: str) -> None:
    if not (port.isascii() and port.isdigit() and 1 <= int(port) <= _MAX_PORT):
        raise ValueError(f"target {target!r}: {port!r} is not a port between 1 and {_MAX_PORT}")
