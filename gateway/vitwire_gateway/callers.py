"""Who asks for something."""

import ipaddress
from itertools import count
from typing import NamedTuple

from vitwire.shared.fairness.shares import Path

_IPV6_PREFIX = 64
"""One host chooses freely among the addresses of such a network."""
_numbers = count()


class Caller(NamedTuple):
    """A name that all requests of a caller share, and the request."""

    name: str
    request: int

    @classmethod
    def of(cls, name: str) -> "Caller":
        """A new request of a caller."""
        return cls(name, next(_numbers))

    @property
    def path(self) -> Path:
        """By which it gets places: callers share them, then the requests of each."""
        return 0, self.name, self.request


def host_name(address: str) -> str:
    """The caller's name by its address, if nothing better is known: the host, or the network of an IPv6 host."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv6Address) and not found.ipv4_mapped:
        return str(ipaddress.ip_network((int(found), _IPV6_PREFIX), strict=False))
    return str(getattr(found, "ipv4_mapped", None) or found)
