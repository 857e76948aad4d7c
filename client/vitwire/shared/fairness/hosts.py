"""Names of callers by their hosts, if nothing better is known."""

import ipaddress
from functools import lru_cache
from urllib.parse import unquote

_IPV6_PREFIX = 64
"""One host chooses freely among the addresses of such a network."""


def host_name(address: str) -> str:
    """The host, or the network of an IPv6 host."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv6Address) and not found.ipv4_mapped:
        return str(ipaddress.ip_network((int(found), _IPV6_PREFIX), strict=False))
    return str(getattr(found, "ipv4_mapped", None) or found)


@lru_cache(1024)
def peer_name(peer: str) -> str:
    """As `host_name`, of gRPC's peers: `ipv4:10.0.0.1:5000`, `ipv6:%5Bfd00::1%5D:5000` or `unix:...`."""
    kind, _, address = unquote(peer).partition(":")
    return host_name(address.rpartition(":")[0].strip("[]")) if kind in ("ipv4", "ipv6") else kind
