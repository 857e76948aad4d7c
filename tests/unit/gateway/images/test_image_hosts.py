"""Which hosts image URLs may name, and which addresses are connected to."""

import ipaddress

import pytest

from vitwire_gateway.images.image_hosts import AllowedHost, is_permitted, parse_networks


@pytest.mark.parametrize(
    ("entry", "host", "port", "matches"),
    [
        ("images.example.org", "IMAGES.example.org.", 443, True),
        ("images.example.org", "images.example.org", 80, True),
        ("images.example.org", "images.example.org", 8080, False),
        ("images.example.org:8080", "images.example.org", 8080, True),
        ("images.example.org:8080", "images.example.org", 443, False),
        ("images.example.org", "x.images.example.org", 443, False),
        ("*.example.org", "x.example.org", 443, True),
        ("*.example.org", "example.org", 443, False),
        ("*.example.org", "evilexample.org", 443, False),
        ("[::1]:80", "::1", 80, True),
    ],
)
def test_allowed_hosts(entry: str, host: str, port: int, matches: bool) -> None:
    assert AllowedHost.parse(entry).matches(host, port) is matches


@pytest.mark.parametrize(
    "entry", ["", "*", "*.", "http://x", "x/y", "x:0", "x:http", "x:70000", "a@b", "x.*.org", "[::1"]
)
def test_bad_allowed_hosts(entry: str) -> None:
    with pytest.raises(ValueError, match="--allow-image-host"):
        AllowedHost.parse(entry)


PRIVATE = [
    "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.1.1",
    "255.255.255.255", "240.0.0.1", "198.18.0.1", "::", "::1", "fe80::1", "fc00::1", "fec0::1", "ff02::1", "ff0e::1",
    "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::127.0.0.1", "64:ff9b::7f00:1", "64:ff9b:1::1", "2002:7f00:1::",
    "2001:0:4136:e378:8000:63bf:80ff:fffe", "2001:db8::1", "100::1",
]  # fmt: skip
PUBLIC = ["8.8.8.8", "151.101.1.69", "2606:4700::1111", "2a00:1450:4001::1", "::ffff:8.8.8.8"]


@pytest.mark.parametrize("address", [*PRIVATE, *PUBLIC])
def test_addresses(address: str) -> None:
    assert is_permitted(ipaddress.ip_address(address), ()) is (address in PUBLIC)


def test_networks_that_are_allowed() -> None:
    networks = parse_networks(["10.8.0.0/16", "fd00::/8"])
    for address, permitted in [("10.8.1.2", True), ("10.9.1.2", False), ("fd12::1", True), ("::ffff:10.8.0.1", True)]:
        assert is_permitted(ipaddress.ip_address(address), networks) is permitted
    with pytest.raises(ValueError, match="--allow-image-network"):
        parse_networks(["10.8.0.1/16"])
