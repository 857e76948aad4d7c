"""Rules for the hosts that image URLs may name and the addresses that may be connected to. Pure."""

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_DEFAULT_PORTS = frozenset({80, 443})
_GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")


@dataclass(frozen=True, slots=True)
class AllowedHost:
    """An entry of `--allow-image-host`: a host, or with `*.` all hosts under a domain; one port or the default ones."""

    host: str
    port: int | None = None

    @classmethod
    def parse(cls, text: str) -> "AllowedHost":
        """Raises ValueError for what is not a host, host:port or *.domain."""
        if text.startswith("["):
            host, bracket, rest = text[1:].partition("]")
            valid = bracket == "]"
        else:
            host, colon, port = text.partition(":")
            rest, valid = colon + port, True
        wildcard = host.removeprefix("*.")
        if not valid or not wildcard or any(each in wildcard for each in "*/@? ") or "://" in text:
            raise ValueError(f"--allow-image-host {text!r}: expected host, host:port or *.domain")
        return cls(_normalised(host), _port(rest, text))

    def matches(self, host: str, port: int) -> bool:
        """True if a URL may name this host and port."""
        if port not in _DEFAULT_PORTS if self.port is None else port != self.port:
            return False
        name = _normalised(host)
        return name.endswith(self.host[1:]) if self.host.startswith("*.") else name == self.host


def parse_networks(texts: Iterable[str]) -> tuple[Network, ...]:
    """The networks of `--allow-image-network`. Raises ValueError."""
    try:
        return tuple(ipaddress.ip_network(text) for text in texts)
    except ValueError as error:
        raise ValueError(f"--allow-image-network: {error}") from error


def is_permitted(address: Address, networks: Iterable[Network]) -> bool:
    """True for an address to connect to: a public one, or one in `networks`.

    IPv6 addresses that carry an IPv4 address are judged by that one if mapped; 6to4, Teredo and NAT64 are not public,
    as they could carry a private one.
    """
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped:
        address = address.ipv4_mapped
    if any(address.version == each.version and address in each for each in networks):
        return True
    if not address.is_global or address.is_multicast or address.is_reserved:
        return False
    if isinstance(address, ipaddress.IPv4Address):
        return True
    return address in _GLOBAL_UNICAST and address.sixtofour is None and address.teredo is None


def _normalised(host: str) -> str:
    return host.rstrip(".").lower()


def _port(rest: str, text: str) -> int | None:
    if not rest:
        return None
    port = rest.removeprefix(":")
    if not (rest.startswith(":") and port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        raise ValueError(f"--allow-image-host {text!r}: {port!r} is not a port")
    return int(port)
